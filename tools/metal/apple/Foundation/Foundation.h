// The part of Foundation that csrc/gpu/metal.mm uses, declared for Linux.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#undef __MAC_OS_X_VERSION_MAX_ALLOWED
#define __MAC_OS_X_VERSION_MAX_ALLOWED 260200
#define YES true
#define NO false
#define nil nullptr
#define NS_ENUM(type, name) \
    enum name : type name;  \
    enum name : type
#define NS_OPTIONS(type, name) \
    type name;                 \
    enum : type

using BOOL = bool;
using NSUInteger = unsigned long;
using NSInteger = long;
using NSTimeInterval = double;
typedef struct objc_object* id;
typedef struct objc_class* Class;
typedef const struct objc_selector* SEL;
using CFTypeRef = const void*;
using CFStringRef = const struct __CFString*;

@class NSArray<T>, NSString;

@protocol NSObject
- (BOOL)respondsToSelector:(SEL)selector;
@end
__attribute__((objc_root_class))
@interface NSObject<NSObject> {
    Class isa;
}
+ (instancetype)alloc;
+ (instancetype)new;
- (instancetype)init;
- (void)dealloc;
@end

@interface NSString : NSObject
+ (instancetype)stringWithUTF8String:(const char*)text;
- (const char*)UTF8String;
@end

@interface NSError : NSObject
@property(readonly) NSInteger code;
@property(readonly) NSString* domain;
@property(readonly) NSString* localizedDescription;
@end

@interface NSArray<T> : NSObject
@property(readonly) NSUInteger count;
+ (instancetype)arrayWithObjects:(const T[])objects count:(NSUInteger)count;
- (T)objectAtIndexedSubscript:(NSUInteger)index;
@end

@interface NSNumber : NSObject
@property(readonly) NSInteger integerValue;
@end

@interface NSURL : NSObject
+ (instancetype)fileURLWithPath:(NSString*)path;
@property(readonly) NSString* path;
@end

typedef NS_ENUM(NSUInteger, NSSearchPathDirectory) { NSCachesDirectory = 13 };
typedef NS_OPTIONS(NSUInteger, NSSearchPathDomainMask) { NSUserDomainMask = 1 };
extern "C" NSArray<NSString*>* NSSearchPathForDirectoriesInDomains(NSSearchPathDirectory,
                                                                   NSSearchPathDomainMask, BOOL expand);

@interface NSProcessInfo : NSObject
@property(class, readonly) NSProcessInfo* processInfo;
@property(readonly) NSString* operatingSystemVersionString;
@end

#if __has_feature(objc_arc)
inline id CFBridgingRelease(CFTypeRef object) {
    return (__bridge_transfer id)object;
}
#endif
