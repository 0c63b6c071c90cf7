// Foundation's part of the simulated framework. Without ARC, which is built on it.
#import <Foundation/Foundation.h>
#import <IOKit/IOKitLib.h>
#import <dispatch/dispatch.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "simulated.h"

extern "C" {
id class_createInstance(Class, size_t);
void object_dispose(id);
id objc_retain(id);
void objc_release(id);
id objc_autorelease(id);
bool objc_opt_respondsToSelector(id, SEL);
}

@implementation NSObject
+ (instancetype)alloc {
    return class_createInstance((Class)self, 0);
}
+ (instancetype)new {
    return [[self alloc] init];
}
- (instancetype)init {
    return self;
}
- (void)dealloc {
    object_dispose(self);
}
- (BOOL)respondsToSelector:(SEL)selector {
    return objc_opt_respondsToSelector(self, selector);
}
@end

@interface NSConstantString : NSString {  // as clang lays constant strings out
   @public
    int flags;
    const char* text;
    long length;
}
@end
@interface SimulatedString : NSString {
   @public
    std::string text;
}
@end
@implementation NSString
+ (instancetype)stringWithUTF8String:(const char*)text {
    SimulatedString* made = [SimulatedString alloc];
    made->text = text;
    return objc_autorelease(made);
}
- (const char*)UTF8String {
    return "";
}
@end
@implementation NSConstantString
- (const char*)UTF8String {
    return text;
}
@end
@implementation SimulatedString
- (const char*)UTF8String {
    return text.c_str();
}
@end

@interface NSError () {
    NSInteger code_;
    NSString *domain_, *text_;
}
@end
@implementation NSError
+ (instancetype)simulated:(NSString*)domain code:(NSInteger)code text:(const char*)text {
    NSError* made = [self alloc];
    made->code_ = code;
    made->domain_ = objc_retain(domain);
    made->text_ = objc_retain([NSString stringWithUTF8String:text]);
    return objc_autorelease(made);
}
- (NSInteger)code {
    return code_;
}
- (NSString*)domain {
    return domain_;
}
- (NSString*)localizedDescription {
    return text_;
}
- (void)dealloc {
    objc_release(domain_);
    objc_release(text_);
    [super dealloc];
}
@end

@interface NSArray () {
    std::vector<id> held_;
}
@end
@implementation NSArray
+ (instancetype)arrayWithObjects:(const id*)objects count:(NSUInteger)count {
    NSArray* made = [self alloc];
    for (NSUInteger i = 0; i < count; ++i) made->held_.push_back(objc_retain(objects[i]));
    return objc_autorelease(made);
}
- (NSUInteger)count {
    return held_.size();
}
- (id)objectAtIndexedSubscript:(NSUInteger)index {
    return held_.at(index);
}
- (void)dealloc {
    for (id object : held_) objc_release(object);
    [super dealloc];
}
@end

@interface NSNumber () {
    NSInteger value_;
}
@end
@implementation NSNumber
+ (instancetype)simulated:(NSInteger)value {
    NSNumber* made = [self alloc];
    made->value_ = value;
    return objc_autorelease(made);
}
- (NSInteger)integerValue {
    return value_;
}
@end

@interface NSURL () {
    NSString* path_;
}
@end
@implementation NSURL
+ (instancetype)fileURLWithPath:(NSString*)path {
    NSURL* made = [self alloc];
    made->path_ = objc_retain(path);
    return objc_autorelease(made);
}
- (NSString*)path {
    return path_;
}
- (void)dealloc {
    objc_release(path_);
    [super dealloc];
}
@end

@interface NSProcessInfo () {
}
@end
@implementation NSProcessInfo
+ (NSProcessInfo*)processInfo {
    static NSProcessInfo* const made = [self alloc];
    return made;
}
- (NSString*)operatingSystemVersionString {
    return @"Version 0 (simulated)";
}
@end

// The folder that a test gives; there is no user here.
NSArray<NSString*>* NSSearchPathForDirectoriesInDomains(NSSearchPathDirectory, NSSearchPathDomainMask, BOOL) {
    NSString* folder = [NSString stringWithUTF8String:simulated::text("caches").c_str()];
    return [NSArray arrayWithObjects:&folder count:simulated::text("caches").empty() ? 0 : 1];
}

@interface SimulatedData : NSObject <OS_dispatch_data> {
   @public
    std::string bytes;
}
@end
@implementation SimulatedData
@end
dispatch_data_t dispatch_data_create(const void* bytes, size_t size, dispatch_queue_t, dispatch_block_t) {
    SimulatedData* made = [SimulatedData alloc];
    made->bytes.assign(static_cast<const char*>(bytes), size);
    return made;
}
const std::string& simulated::bytes_of(dispatch_data_t data) {
    return ((SimulatedData*)data)->bytes;
}

// IOKit knows one service, whose one property is the number of GPU cores.
CFMutableDictionaryRef IOServiceMatching(const char* name) {
    return std::strcmp(name, "AGXAccelerator") ? nullptr : const_cast<char*>("AGXAccelerator");
}
io_object_t IOServiceGetMatchingService(unsigned, CFMutableDictionaryRef matching) {
    return matching ? 1 : 0;
}
CFTypeRef IORegistryEntryCreateCFProperty(io_object_t, CFStringRef key, const void*, unsigned) {
    if (std::strcmp([(NSString*)key UTF8String], "gpu-core-count")) return nullptr;
    return objc_retain([NSNumber simulated:simulated::setting("cores")]);
}
int IOObjectRelease(io_object_t) {
    return 0;
}
