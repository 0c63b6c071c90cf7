// The part of libdispatch that csrc/gpu/metal.mm uses, declared for Linux.
#pragma once

#include <Foundation/Foundation.h>

@protocol OS_dispatch_data <NSObject>
@end
using dispatch_data_t = NSObject<OS_dispatch_data>*;
using dispatch_queue_t = NSObject*;
using dispatch_block_t = void (^)(void);
extern "C" dispatch_data_t dispatch_data_create(const void* bytes, size_t size, dispatch_queue_t,
                                                dispatch_block_t destructor)
    __attribute__((ns_returns_retained));
#define DISPATCH_DATA_DESTRUCTOR_DEFAULT nil  // copies the bytes
