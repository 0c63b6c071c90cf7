// What the parts of the simulated framework share: settings and what is noted, both for the tests, which
// reach them through the functions at the end; errors; a buffer's memory.
#pragma once

#import <Metal/Metal.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tools/metal/runtime.h"

@interface NSError (Simulated)
+ (instancetype)simulated:(NSString*)domain code:(NSInteger)code text:(const char*)text;
@end
@interface NSNumber (Simulated)
+ (instancetype)simulated:(NSInteger)value;
@end

namespace simulated {

// What a test sets. A countdown n: the n-th from now, from 1; 0: none.
//   name               standard      what it is
#define SIMULATED_SETTINGS(X)                                                                 \
    X(family, 1009) /* the latest MTLGPUFamilyApple that it has */                            \
    X(cores, 10)                                                                              \
    X(working_set, 8l << 30) /* recommendedMaxWorkingSetSize */                               \
    X(max_buffer, 4l << 30)  /* maxBufferLength */                                            \
    X(residency, 1)          /* whether there are residency sets */                           \
    X(no_device, 0)                                                                           \
    X(simd_width, 32)                                                                         \
    X(max_threads, 1024)  /* of a threadgroup */                                              \
    X(refuse_buffer, 0)   /* countdown: no memory from there on */                            \
    X(refuse_library, 0)  /* countdown: a source does not compile */                          \
    X(refuse_tensors, 0)  /* whether no source of Metal 4 compiles */                         \
    X(refuse_pipeline, 0) /* countdown */                                                     \
    X(fail_buffer, 0)     /* countdown: a command buffer ends in an error ... */              \
    X(fail_code, 8)       /* ... of this code */                                              \
    X(lost, 0)            /* every command buffer fails */                                    \
    X(skip_kernels, 0)    /* dispatches do nothing */                                         \
    X(ahead, 0)           /* a command buffer waits until so many later ones are committed */ \
    X(log, 0)             /* whether commits and completions are noted */

int64_t setting(const std::string& name);
bool count_down(const std::string& name);  // whether this is the one
bool runs_out(const std::string& name);    // whether this is the one, or a later one
std::string text(const std::string& name);
void note(const std::string& event);
void problem(const std::string& what);  // misuse, which Metal would not forgive or not notice

const std::string& bytes_of(dispatch_data_t);

// Memory that the host and the GPU see at different addresses, as they do on a Mac.
struct Memory {
    std::byte *host = nullptr, *gpu = nullptr;
    size_t bytes = 0;
    explicit Memory(size_t bytes);
    Memory(void* host, size_t bytes) : host(static_cast<std::byte*>(host)), gpu(this->host), bytes(bytes) {}
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory();
    bool is_owned() const { return owned_; }

   private:
    bool owned_ = false;
};

// A library that tools/metal/compile.py made.
const lily::metal::Library* open_library(const std::string& path, std::string& error);

struct BufferInfo {
    uint64_t id = 0;
    std::byte* gpu = nullptr;
    size_t bytes = 0;
};
std::vector<BufferInfo> buffers_of(id<MTLAllocation>);
bool in_flight(uint64_t buffer);  // whether a command buffer that uses it has not completed

}  // namespace simulated

@class SimulatedHeap;
@interface SimulatedBuffer : NSObject <MTLBuffer> {
   @public
    simulated::BufferInfo info;
    simulated::Memory* memory;  // of its own, if it is in no heap
    std::byte* host;
    SimulatedHeap* heap;
}
@end

@interface SimulatedPipeline : NSObject <MTLComputePipelineState> {
   @public
    const lily::metal::Library* library;
    uint32_t kernel;
}
@end

@interface SimulatedQueue : NSObject <MTLCommandQueue>
@end

@interface SimulatedFence : NSObject <MTLFence>
@end

@interface SimulatedResidencySet : NSObject <MTLResidencySet> {
   @public
    std::vector<id<MTLAllocation>> pending, held;
    bool requested;
}
@end

@interface SimulatedEvent : NSObject <MTLSharedEvent>
@end

extern "C" {
__attribute__((visibility("default"))) void lily_simulated_set(const char* name, int64_t value);
__attribute__((visibility("default"))) void lily_simulated_set_text(const char* name, const char* value);
__attribute__((visibility("default"))) int64_t lily_simulated_get(const char* name);
// "problems", "log" and "alive", a line each: since the last time, but for what is alive.
__attribute__((visibility("default"))) const char* lily_simulated_text(const char* name);
}
