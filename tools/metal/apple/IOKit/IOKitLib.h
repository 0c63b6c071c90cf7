// The part of IOKit that csrc/gpu/metal.mm uses, declared for Linux.
#pragma once

#include <Foundation/Foundation.h>

using io_object_t = unsigned;
using CFMutableDictionaryRef = void*;
constexpr unsigned kIOMainPortDefault = 0;
extern "C" {
CFMutableDictionaryRef IOServiceMatching(const char* name);
io_object_t IOServiceGetMatchingService(unsigned port, CFMutableDictionaryRef matching);  // which it releases
CFTypeRef IORegistryEntryCreateCFProperty(io_object_t entry, CFStringRef key, const void* allocator,
                                          unsigned options);
int IOObjectRelease(io_object_t);
}
