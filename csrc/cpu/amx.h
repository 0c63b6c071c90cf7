// AMX's tiles as a process gets at them: the system's permission, and their shape.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace lily {
namespace {

// Asks the system to let this process use tiles; returns whether it may.
inline bool may_use_tiles() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl, in Linux' asm/prctl.h
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Makes the eight tiles 16 rows of 64 bytes while it lives.
class Tiles {
   public:
    Tiles() {
        // gcc 12's _tile_loadconfig says that it reads 8 bytes of these 64, and drops what would write the
        // rest.
        asm volatile("ldtilecfg %0" ::"m"(kShape));
    }
    ~Tiles() { asm volatile("tilerelease"); }

   private:
    struct alignas(64) Shape {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };
    static constexpr Shape kShape = {
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
};

// gcc 12's _tile_loadd does not say that it reads memory: what is written there stays before this.
inline void before_loads() {
    asm volatile("" ::: "memory");
}

}  // namespace
}  // namespace lily
