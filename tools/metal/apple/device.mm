// The simulated device, its memory, and its libraries.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <utility>

#include "objc.h"
#include "simulated.h"

namespace simulated {

namespace {

// Of a compiled library, in place of a metallib's bytes: then its path follows.
constexpr const char* kMagic = "simulated metallib ";

struct Notes {
    std::mutex mutex;
    std::map<std::string, int64_t> settings = {
#define SIMULATED_SETTING(name, standard) {#name, standard},
        SIMULATED_SETTINGS(SIMULATED_SETTING)
#undef SIMULATED_SETTING
    };
    std::map<std::string, std::string> texts;
    size_t allocated = 0, used = 0, mapped = 0;  // by the device; of it and of heaps, by buffers; host's
    uint64_t buffers = 0;
};

Notes& notes() {
    static auto* const made = new Notes;
    return *made;
}

}  // namespace

int64_t setting(const std::string& name) {
    const std::lock_guard lock(notes().mutex);
    return notes().settings.at(name);
}

bool count_down(const std::string& name) {
    const std::lock_guard lock(notes().mutex);
    int64_t& left = notes().settings.at(name);
    return left > 0 && --left == 0;
}

bool runs_out(const std::string& name) {
    const std::lock_guard lock(notes().mutex);
    int64_t& left = notes().settings.at(name);
    if (left == 1) return true;
    if (left > 1) --left;
    return false;
}

std::string text(const std::string& name) {
    const std::lock_guard lock(notes().mutex);
    return notes().texts[name];
}

void note(const std::string& event) {
    const std::lock_guard lock(notes().mutex);
    if (notes().settings["log"]) notes().texts["log"] += event + "\n";
}

void problem(const std::string& what) {
    const std::lock_guard lock(notes().mutex);
    notes().texts["problems"] += what + "\n";
}

static void account(size_t more, size_t less) {
    const std::lock_guard lock(notes().mutex);
    notes().allocated += more - less;
}

static void map(size_t more, size_t less) {
    const std::lock_guard lock(notes().mutex);
    notes().mapped += more - less;
}

static void use(size_t more, size_t less) {
    const std::lock_guard lock(notes().mutex);
    notes().used += more - less;
}

Memory::Memory(size_t wanted) : bytes(wanted), owned_(true) {
    const int file = memfd_create("metal", MFD_CLOEXEC);
    if (file < 0) return;
    if (ftruncate(file, static_cast<off_t>(bytes)) == 0)
        for (std::byte** view : {&host, &gpu}) {
            void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
            if (mapped != MAP_FAILED) *view = static_cast<std::byte*>(mapped);
        }
    close(file);
    account(bytes, 0);
}

Memory::~Memory() {
    if (!owned_) return;
    for (std::byte* view : {host, gpu})
        if (view) munmap(view, bytes);
    account(0, bytes);
}

const lily::metal::Library* open_library(const std::string& path, std::string& error) {
    void* file = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays: pipelines point into it
    auto* open = file ? reinterpret_cast<const lily::metal::Library* (*)()>(dlsym(file, "lily_metal_library"))
                      : nullptr;
    if (open) return open();
    const char* reason = dlerror();
    error = reason ? reason : path + " is no library";
    return nullptr;
}

namespace {

// What `command` prints; an empty optional, with what it complained of, if it fails.
std::optional<std::string> output_of(const std::string& command, std::string& error) {
    std::string printed;
    std::array<char, 4096> part;
    FILE* pipe = popen((command + " 2>&1").c_str(), "r");
    if (!pipe) return std::nullopt;
    while (const size_t n = fread(part.data(), 1, part.size(), pipe)) printed.append(part.data(), n);
    if (pclose(pipe) == 0) return printed;
    error = printed;
    return std::nullopt;
}

// Compiles a source with tools/metal/compile.py, or finds what it made of the same source before.
// old: by a language that has no tensors.
const lily::metal::Library* compile(const std::string& source, bool old, std::string& error) {
    const std::string define = old ? " -D MSL_NO_TENSOR=1" : "";
    std::ostringstream name;
    name << LILY_SIMULATED_FOLDER << "/source-" << std::hex << std::hash<std::string>()(source + define);
    const std::string made = name.str() + ".so";
    if (!std::filesystem::exists(made)) {
        const std::string file = name.str() + "-" + std::to_string(getpid()) + ".metal";
        std::ofstream(file) << source;
        const std::string part = made + "." + std::to_string(getpid());
        const auto done =
            output_of("cd " LILY_SIMULATED_ROOT " && " LILY_SIMULATED_PYTHON " -m tools.metal.compile " +
                          file + define + " -o " + part,
                      error);
        std::filesystem::remove(file);
        if (!done) return nullptr;
        std::filesystem::rename(part, made);
    }
    return open_library(made, error);
}

}  // namespace

}  // namespace simulated

using namespace simulated;

@implementation SimulatedFence
@end

@interface SimulatedFunction : NSObject <MTLFunction> {
   @public
    const lily::metal::Library* library;
    uint32_t kernel;
}
@end
@implementation SimulatedFunction
@end

@interface SimulatedLibrary : NSObject <MTLLibrary> {
   @public
    const lily::metal::Library* library;
}
@end
@implementation SimulatedLibrary
@synthesize label;
- (NSArray<NSString*>*)functionNames {
    std::vector<NSString*> names;
    for (uint32_t i = 0; i < library->kernel_count; ++i)
        names.push_back([NSString stringWithUTF8String:library->kernels[i].name]);
    return [NSArray arrayWithObjects:names.data() count:names.size()];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
    for (uint32_t i = 0; i < library->kernel_count; ++i)
        if (!std::strcmp(library->kernels[i].name, name.UTF8String)) {
            SimulatedFunction* made = [SimulatedFunction new];
            made->library = library;
            made->kernel = i;
            return made;
        }
    return nil;
}
@end

@implementation SimulatedPipeline
- (NSUInteger)maxTotalThreadsPerThreadgroup {
    return std::min<NSUInteger>(library->kernels[kernel].max_threads, setting("max_threads"));
}
- (NSUInteger)threadExecutionWidth {
    return setting("simd_width");
}
- (NSUInteger)staticThreadgroupMemoryLength {
    return 0;  // the simulator counts a group's memory when it runs
}
@end

@interface SimulatedHeap : NSObject <MTLHeap> {
   @public
    Memory* memory;
    std::map<size_t, size_t> taken;  // begin, end
    std::mutex mutex;
}
@end
@implementation SimulatedHeap
@synthesize label;
- (NSUInteger)usedSize {
    const std::lock_guard lock(mutex);
    size_t used = 0;
    for (const auto& [begin, end] : taken) used += end - begin;
    return used;
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
    if (options != (MTLResourceStorageModeShared | MTLResourceHazardTrackingModeUntracked))
        problem("a heap's buffer has other options than the heap");
    if (runs_out("refuse_buffer")) return nil;
    const std::lock_guard lock(mutex);
    const size_t whole = (length + 255) / 256 * 256;
    size_t begin = 0;
    for (const auto& [from, to] : taken) {
        if (begin + whole <= from) break;
        begin = to;
    }
    if (begin + whole > memory->bytes) return nil;
    taken[begin] = begin + whole;
    SimulatedBuffer* made = [SimulatedBuffer new];
    made->info.gpu = memory->gpu + begin;
    made->info.bytes = length;
    made->host = memory->host + begin;
    made->heap = self;
    use(length, 0);
    std::memset(made->host, 0xa5, whole);  // a heap's memory is not cleared
    return made;
}
- (void)dealloc {
    if (!taken.empty()) problem("a heap was released with buffers in it");
    delete memory;
}
@end
@implementation MTLHeapDescriptor
@end

@implementation SimulatedBuffer
@synthesize label;
- (instancetype)init {
    static std::atomic<uint64_t> made{0};
    info.id = ++made;
    return self;
}
- (NSUInteger)length {
    return info.bytes;
}
- (uint64_t)gpuAddress {
    return reinterpret_cast<uint64_t>(info.gpu);
}
- (void*)contents {
    return host;
}
- (void)dealloc {
    if (in_flight(info.id)) problem("a buffer was released while a command buffer used it");
    if (heap || memory->is_owned())
        use(0, info.bytes);
    else
        map(0, info.bytes);
    if (heap) {
        const std::lock_guard lock(heap->mutex);
        heap->taken.erase(static_cast<size_t>(host - heap->memory->host));
    }
    delete memory;
}
@end

std::vector<BufferInfo> simulated::buffers_of(id<MTLAllocation> allocation) {
    if ([(NSObject*)allocation respondsToSelector:@selector(usedSize)]) {
        const Memory& memory = *((SimulatedHeap*)allocation)->memory;
        return {{0, memory.gpu, memory.bytes}};
    }
    return {((SimulatedBuffer*)allocation)->info};
}

@implementation MTLResidencySetDescriptor
@synthesize label;
@end
@implementation SimulatedResidencySet
- (void)addAllocation:(id<MTLAllocation>)allocation {
    pending.push_back(allocation);
}
- (void)removeAllocation:(id<MTLAllocation>)allocation {
    if (std::erase(pending, allocation) == 0) problem("a residency set has no such allocation to remove");
}
- (void)commit {
    held = pending;
}
- (void)requestResidency {
    requested = true;
    note("request residency");
}
- (void)endResidency {
    if (!requested) problem("endResidency without requestResidency");
    requested = false;
}
- (void)dealloc {
    if (requested) problem("a residency set was released while it was requested");
}
@end

@implementation MTLCompileOptions
@end
@implementation MTLComputePipelineDescriptor
@synthesize label, computeFunction, binaryArchives;
@end
@implementation MTLBinaryArchiveDescriptor
@synthesize url;
@end

// Holds the names of what was added, and is a file of them.
@interface SimulatedArchive : NSObject <MTLBinaryArchive> {
   @public
    std::string names;
}
@end
@implementation SimulatedArchive
- (BOOL)addComputePipelineFunctionsWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                            error:(NSError**)error {
    const auto* function = (SimulatedFunction*)descriptor.computeFunction;
    names += function->library->kernels[function->kernel].name + std::string("\n");
    return YES;
}
- (BOOL)serializeToURL:(NSURL*)url error:(NSError**)error {
    std::ofstream file(url.path.UTF8String);
    file << names;
    file.close();
    if (!file) *error = [NSError simulated:@"MTLBinaryArchiveDomain" code:1 text:"cannot be written"];
    return bool(file);
}
@end

@interface SimulatedDevice : NSObject <MTLDevice>
@end
@implementation SimulatedDevice
- (NSString*)name {
    return @"Simulated Apple GPU";
}
- (uint64_t)recommendedMaxWorkingSetSize {
    return static_cast<uint64_t>(setting("working_set"));
}
- (NSUInteger)currentAllocatedSize {
    const std::lock_guard lock(notes().mutex);
    return notes().allocated;
}
- (NSUInteger)maxBufferLength {
    return static_cast<NSUInteger>(setting("max_buffer"));
}
- (NSUInteger)maxThreadgroupMemoryLength {
    return lily::metal::kThreadgroupMemory;
}
- (BOOL)hasUnifiedMemory {
    return YES;
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
    return family == MTLGPUFamilyMetal3 || family <= setting("family");
}
- (id<MTLCommandQueue>)newCommandQueue {
    return [SimulatedQueue new];
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
    if (length == 0) problem("a buffer of no bytes");
    if (length > self.maxBufferLength || runs_out("refuse_buffer")) return nil;
    auto* memory = new Memory(length);
    if (!memory->host || !memory->gpu) {
        delete memory;
        return nil;
    }
    SimulatedBuffer* made = [SimulatedBuffer new];
    made->memory = memory;
    made->info.gpu = memory->gpu;
    made->info.bytes = length;
    made->host = memory->host;
    use(length, 0);
    return made;
}
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void*, NSUInteger))deallocator {
    const auto page = static_cast<NSUInteger>(sysconf(_SC_PAGESIZE));
    if (reinterpret_cast<uintptr_t>(pointer) % page || length % page || length == 0) {
        problem("bytesNoCopy: wanted whole pages");
        return nil;
    }
    if (deallocator) problem("bytesNoCopy: a deallocator, which is not simulated");
    if (length > self.maxBufferLength || runs_out("refuse_buffer")) return nil;
    SimulatedBuffer* made = [SimulatedBuffer new];
    made->memory = new Memory(pointer, length);
    map(length, 0);
    made->info.gpu = made->memory->gpu;
    made->info.bytes = length;
    made->host = made->memory->host;
    return made;
}
- (id<MTLHeap>)newHeapWithDescriptor:(MTLHeapDescriptor*)descriptor {
    if (runs_out("refuse_buffer")) return nil;
    if (descriptor.storageMode != MTLStorageModeShared ||
        descriptor.hazardTrackingMode != MTLHazardTrackingModeUntracked)
        problem("a heap is simulated shared and untracked only");
    auto* memory = new Memory(descriptor.size);
    if (!memory->host || !memory->gpu) {
        delete memory;
        return nil;
    }
    SimulatedHeap* made = [SimulatedHeap new];
    made->memory = memory;
    return made;
}
- (id<MTLFence>)newFence {
    return [SimulatedFence new];
}
- (id<MTLSharedEvent>)newSharedEvent {
    return [SimulatedEvent new];
}
- (id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor*)descriptor
                                               error:(NSError**)error {
    return setting("residency") ? [SimulatedResidencySet new] : nil;
}
- (id<MTLLibrary>)library:(const lily::metal::Library*)found
                   reason:(const std::string&)reason
                    error:(NSError**)error {
    if (found) {
        SimulatedLibrary* made = [SimulatedLibrary new];
        made->library = found;
        return made;
    }
    if (error) *error = [NSError simulated:@"MTLLibraryErrorDomain" code:3 text:reason.c_str()];
    return nil;
}
- (id<MTLLibrary>)newLibraryWithData:(dispatch_data_t)data error:(NSError**)error {
    const std::string& bytes = bytes_of(data);
    std::string reason = "not a metallib";
    const lily::metal::Library* found = nullptr;
    if (count_down("refuse_library"))
        reason = "refused";
    else if (bytes.starts_with(kMagic))
        found = open_library(bytes.substr(std::strlen(kMagic)), reason);
    return [self library:found reason:reason error:error];
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source
                               options:(MTLCompileOptions*)options
                                 error:(NSError**)error {
    std::string reason;
    const lily::metal::Library* found = nullptr;
    note("source");
    if (count_down("refuse_library") ||
        (setting("refuse_tensors") && options.languageVersion >= MTLLanguageVersion4_0))
        reason = "program_source:1:1: error: refused";
    else
        found = compile(source.UTF8String, options.languageVersion < MTLLanguageVersion4_0, reason);
    return [self library:found reason:reason error:error];
}
- (id<MTLBinaryArchive>)newBinaryArchiveWithDescriptor:(MTLBinaryArchiveDescriptor*)descriptor
                                                 error:(NSError**)error {
    SimulatedArchive* made = [SimulatedArchive new];
    if (!descriptor.url) return made;
    std::ifstream file(descriptor.url.path.UTF8String);
    std::ostringstream text;
    text << file.rdbuf();
    made->names = text.str();
    if (file) return made;
    *error = [NSError simulated:@"MTLBinaryArchiveDomain" code:1 text:"cannot be read"];
    return nil;
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                                             options:(MTLPipelineOption)options
                                                          reflection:
                                                              (MTLComputePipelineReflection**)reflection
                                                               error:(NSError**)error {
    if (!(options & MTLPipelineOptionFailOnBinaryArchiveMiss) && count_down("refuse_pipeline")) {
        *error = [NSError simulated:@"AGXMetal" code:2 text:"Compiler encountered an internal error"];
        return nil;
    }
    const auto* function = (SimulatedFunction*)descriptor.computeFunction;
    SimulatedPipeline* made = [SimulatedPipeline new];
    made->library = function->library;
    made->kernel = function->kernel;
    const std::string name = made->library->kernels[made->kernel].name;
    bool archived = false;
    for (NSUInteger i = 0; i < descriptor.binaryArchives.count; ++i)
        archived |=
            ("\n" + ((SimulatedArchive*)descriptor.binaryArchives[i])->names).find("\n" + name + "\n") !=
            std::string::npos;
    if (!archived && (options & MTLPipelineOptionFailOnBinaryArchiveMiss)) return nil;
    note((archived ? "archived " : "compiled ") + name);
    return made;
}
@end

id<MTLDevice> MTLCreateSystemDefaultDevice() {
    if (setting("no_device")) return nil;
    static SimulatedDevice* const device = [SimulatedDevice new];  // the same every time, as Apple's
    return device;
}

void lily_simulated_set(const char* name, int64_t value) {
    const std::lock_guard lock(notes().mutex);
    notes().settings.at(name) = value;
}
void lily_simulated_set_text(const char* name, const char* value) {
    const std::lock_guard lock(notes().mutex);
    notes().texts[name] = value;
}
int64_t lily_simulated_get(const char* name) {
    for (const auto& [known, bytes] :
         {std::pair("allocated", &notes().allocated), {"used", &notes().used}, {"mapped", &notes().mapped}}) {
        const std::lock_guard lock(notes().mutex);
        if (!std::strcmp(name, known)) return static_cast<int64_t>(*bytes);
    }
    return setting(name);
}
const char* lily_simulated_text(const char* name) {
    thread_local std::string answer;
    if (!std::strcmp(name, "alive")) {
        answer = lily_objc_alive();
        return answer.c_str();
    }
    const std::lock_guard lock(notes().mutex);
    answer = std::exchange(notes().texts[name], "");
    return answer.c_str();
}
