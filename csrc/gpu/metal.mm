// Metal: a Device over Apple's GPUs. Buffers are shared and untracked, so all order is ours: a barrier where
// the recorder asks for one, a fence from one command buffer to the next.
//
// A command buffer holds no references. Memory that is given back while one may still use it waits until that
// has completed.
#import <Foundation/Foundation.h>
#import <IOKit/IOKitLib.h>
#import <Metal/Metal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "error.h"
#include "gpu/device.h"
#include "gpu/embedded.h"

namespace lily {

namespace {

#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 260000
#define LILY_HAS_METAL4 1
constexpr MTLGPUFamily kFamilyOfM5 = MTLGPUFamilyApple10;
#else
#define LILY_HAS_METAL4 0
constexpr auto kFamilyOfM5 = static_cast<MTLGPUFamily>(1010);
#endif

// What a chip is taken to do, for cutting work into command buffers: bytes a second by Apple's data sheets,
// operations a second of a core as measured for products elsewhere.
struct Chip {
    MTLGPUFamily family;
    long cores;        // at least
    double bandwidth;  // bytes a second
    double rate;       // operations a second of a core
    double longest;    // seconds of a command buffer: the display waits meanwhile, and the watchdog ends it
};
constexpr Chip kChips[] = {
    {MTLGPUFamilyApple7, 0, 68e9, 0.20e12, 0.05},    // M1
    {MTLGPUFamilyApple7, 14, 200e9, 0.20e12, 0.05},  // M1 Pro
    {MTLGPUFamilyApple7, 24, 400e9, 0.20e12, 0.05},  // M1 Max
    {MTLGPUFamilyApple7, 48, 800e9, 0.20e12, 0.05},  // M1 Ultra
    {MTLGPUFamilyApple8, 0, 100e9, 0.22e12, 0.05},   // M2
    {MTLGPUFamilyApple8, 16, 200e9, 0.22e12, 0.05},  // M2 Pro
    {MTLGPUFamilyApple8, 30, 400e9, 0.22e12, 0.05},  // M2 Max
    {MTLGPUFamilyApple8, 60, 800e9, 0.22e12, 0.05},  // M2 Ultra
    {MTLGPUFamilyApple9, 0, 100e9, 0.25e12, 0.05},   // M3, M4
    {MTLGPUFamilyApple9, 14, 150e9, 0.25e12, 0.05},  // M3 Pro, M4 Pro
    {MTLGPUFamilyApple9, 30, 300e9, 0.25e12, 0.05},  // M3 Max, M4 Max
    {MTLGPUFamilyApple9, 60, 800e9, 0.25e12, 0.05},  // M3 Ultra
    {kFamilyOfM5, 0, 150e9, 1.2e12, 0.1},            // M5
    {kFamilyOfM5, 16, 300e9, 1.2e12, 0.1},           // M5 Pro
    {kFamilyOfM5, 32, 460e9, 1.2e12, 0.1},           // M5 Max
};

constexpr size_t kReserve = size_t{512} << 20;  // of the working set, left to others
constexpr size_t kSmall = size_t{1} << 20;      // up to which memory is a part of a heap
constexpr size_t kHeap = size_t{16} << 20;      // bytes of a heap
constexpr size_t kOverlap = size_t{1} << 30;    // of two views of one file: more than its largest tensor
constexpr uint64_t kPatience = 100;             // milliseconds between looks at whether the GPU has failed
constexpr double kDispatch = 2e-6;              // seconds that the smallest dispatch takes
constexpr auto kBeat = std::chrono::milliseconds(500);  // the system lets go of what lies idle for a second

constexpr MTLResourceOptions kOptions = MTLResourceStorageModeShared | MTLResourceHazardTrackingModeUntracked;

NSString* text(const std::string& s) {
    return [NSString stringWithUTF8String:s.c_str()];
}

std::string words(NSError* error) {
    return error ? std::string(error.localizedDescription.UTF8String) : "no reason given";
}

double gigabytes(size_t bytes) {
    return static_cast<double>(bytes) / 1e9;
}

const char* advice_on(NSInteger code) {
    switch (static_cast<MTLCommandBufferError>(code)) {
        case MTLCommandBufferErrorOutOfMemory:
            return "The GPU has too little memory: close other programs, take a shorter prompt, or raise "
                   "`sudo sysctl iogpu.wired_limit_mb`.";
        case MTLCommandBufferErrorTimeout:
            return "The system ended work that took too long: use a smaller prefill_chunk.";
        case MTLCommandBufferErrorNotPermitted:
            return "The system lets no program in the background use the GPU: bring it to the front.";
        case MTLCommandBufferErrorAccessRevoked:
            return "The system takes no more work from this process: start it again.";
        case MTLCommandBufferErrorDeviceRemoved:
            return "The GPU is gone: load the model again.";
        default:
            return "Load the model again; if it happens anew, `lily selftest` tells more.";
    }
}

long cores_of_gpu() {
    const io_object_t service =
        IOServiceGetMatchingService(kIOMainPortDefault, IOServiceMatching("AGXAccelerator"));
    if (!service) return 0;
    const NSNumber* cores = CFBridgingRelease(
        IORegistryEntryCreateCFProperty(service, (__bridge CFStringRef) @"gpu-core-count", nullptr, 0));
    IOObjectRelease(service);
    return cores ? cores.integerValue : 0;
}

Chip chip_of(id<MTLDevice> device) {
    const long cores = cores_of_gpu();
    Chip found = kChips[0];
    for (const Chip& chip : kChips)
        if ([device supportsFamily:chip.family] && (chip.family > found.family || cores >= chip.cores))
            found = chip;
    found.cores = cores ? cores : std::max(found.cores, 7l);  // the fewest that any has
    return found;
}

bool serves(id<MTLDevice> device) {
    return device.hasUnifiedMemory && [device supportsFamily:MTLGPUFamilyApple7] &&
           [device supportsFamily:MTLGPUFamilyMetal3];
}

// Whether the chip, the system and the SDK of the build have what Metal 4's tensor operations take: a matrix
// unit, and bfloat in them.
bool has_tensors(id<MTLDevice> device) {
#if LILY_HAS_METAL4
    if (@available(macOS 26.2, *)) return [device supportsFamily:kFamilyOfM5];
#endif
    return false;
}

// A stretch of the host's memory that the GPU has too.
struct Region {
    size_t bytes = 0;
    id<MTLBuffer> buffer = nil;
    size_t offset = 0;  // of the stretch in the buffer
};

// How far the work has come. Command buffers are numbered from 1, and complete in that order.
class Progress {
   public:
    // Called by Metal, on a thread of its own.
    void complete(uint64_t number, double begin, double end, const std::string& error) {
        {
            const std::lock_guard lock(mutex_);
            completed_ = std::max(completed_, number);
            seconds_ += std::max(0.0, end - std::max(begin, until_));  // two may run side by side
            until_ = std::max(until_, end);
            if (error_.empty()) error_ = error;
        }
        completion_.notify_all();
    }
    void wait(uint64_t number) {
        std::unique_lock lock(mutex_);
        completion_.wait(lock, [&] { return completed_ >= number; });
    }
    uint64_t completed() const {
        const std::lock_guard lock(mutex_);
        return completed_;
    }
    std::string error() const {
        const std::lock_guard lock(mutex_);
        return error_;
    }
    double seconds() {
        const std::lock_guard lock(mutex_);
        return std::exchange(seconds_, 0);
    }

   private:
    mutable std::mutex mutex_;
    std::condition_variable completion_;
    uint64_t completed_ = 0;
    double seconds_ = 0, until_ = 0;
    std::string error_;  // the first; nothing after it can be trusted
};

// The GPU's memory. Shared by the device and by what it allocated.
class Space {
   public:
    // resident: how long after the last work memory is kept resident.
    Space(id<MTLDevice> device, id<MTLCommandQueue> queue, std::chrono::seconds resident)
        : device_(device), queue_(queue), resident_(resident) {
        if (@available(macOS 15.0, *)) {
            MTLResidencySetDescriptor* descriptor = [MTLResidencySetDescriptor new];
            descriptor.label = @"lily";
            residency_ = [device newResidencySetWithDescriptor:descriptor error:nil];
            if (residency_) [queue addResidencySet:residency_];
        }
    }
    Space(const Space&) = delete;
    Space& operator=(const Space&) = delete;
    ~Space() {
        @autoreleasepool {
            retired_.clear();
            regions_.clear();
        }
    }

    // Nothing dispatched from here on.
    void close() {
        {
            const std::lock_guard lock(mutex_);
            closes_ = true;
        }
        work_.notify_all();
        if (keeper_.joinable()) keeper_.join();
        if (@available(macOS 15.0, *)) {
            if (!residency_) return;
            if (requested_) [residency_ endResidency];
            [queue_ removeResidencySet:residency_];
        }
    }

    std::byte* allocate(size_t bytes) {
        const std::lock_guard lock(mutex_);
        sweep();
        check_room(bytes);
        const size_t whole = std::max<size_t>(bytes, 16);
        id<MTLBuffer> buffer = whole <= kSmall ? of_heap(whole) : nil;
        if (!buffer) {
            buffer = [device_ newBufferWithLength:whole options:kOptions];
            if (!buffer) refuse(bytes);
            make_resident(buffer);
        }
        auto* begin = static_cast<std::byte*>(buffer.contents);
        std::memset(begin, 0, whole);
        regions_[begin] = {whole, buffer, 0};
        allocated_ += whole;
        return begin;
    }

    void release(std::byte* begin) {
        const std::lock_guard lock(mutex_);
        const auto found = regions_.find(begin);
        allocated_ -= found->second.bytes;
        retired_.push_back({opened_, found->second.buffer, found->second.bytes > kSmall});
        regions_.erase(found);
        sweep();
    }

    // Throws if so much more is not to be had, before any of it is allocated.
    void admit(size_t bytes) {
        const std::lock_guard lock(mutex_);
        sweep();
        check_room(bytes);
    }
    size_t room() const {
        const std::lock_guard lock(mutex_);
        const size_t kept = taken() + kHeap;
        return usable() > kept ? usable() - kept : 0;
    }

    // Whole pages around a stretch of a file, as views that overlap where one buffer can't hold it.
    void map(std::span<const std::byte> memory, const std::string& label) {
        const std::lock_guard lock(mutex_);
        check_room(memory.size());
        const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const auto at = reinterpret_cast<uintptr_t>(memory.data());
        const uintptr_t first = at / page * page, last = (at + memory.size() + page - 1) / page * page;
        const size_t longest = device_.maxBufferLength / page * page;
        const size_t overlap = std::min(kOverlap, longest / 2) / page * page;
        for (uintptr_t begin = first; begin < last; begin += longest - overlap) {
            const size_t bytes = std::min<size_t>(longest, last - begin);
            id<MTLBuffer> view = [device_ newBufferWithBytesNoCopy:reinterpret_cast<void*>(begin)
                                                            length:bytes
                                                           options:kOptions
                                                       deallocator:nil];
            if (!view) refuse(bytes);
            view.label = text(label);
            regions_[reinterpret_cast<const std::byte*>(begin)] = {bytes, view, 0};
            make_resident(view);
            if (begin + bytes == last) break;
        }
        mapped_ += last - first;
    }

    // The region that holds all of a stretch; one without a buffer if none does. Of two views of a file, both
    // may hold where it begins.
    Region find(const void* data, size_t bytes) const {
        const std::lock_guard lock(mutex_);
        const auto* begin = static_cast<const std::byte*>(data);
        auto next = regions_.upper_bound(begin);
        for (int tried = 0; tried < 2 && next != regions_.begin(); ++tried) {
            --next;
            const auto offset = static_cast<size_t>(begin - next->first);
            if (offset + bytes <= next->second.bytes)
                return {next->second.bytes, next->second.buffer, next->second.offset + offset};
        }
        return {};
    }

    bool is_resident() const { return residency_ != nil; }

    // Before a command buffer is committed, for residency is settled then.
    void settle() {
        if (@available(macOS 15.0, *)) {
            {
                const std::lock_guard lock(mutex_);
                if (!residency_) return;
                if (std::exchange(changed_, false)) [residency_ commit];
                const auto before = std::exchange(used_, Clock::now());
                if (used_ - before > kBeat) request();
                if (!keeper_.joinable() && resident_.count() > 0) keeper_ = std::thread([this] { keep(); });
            }
            work_.notify_all();
        }
    }

    uint64_t open() {
        const std::lock_guard lock(mutex_);
        return ++opened_;
    }
    uint64_t opened() const {
        const std::lock_guard lock(mutex_);
        return opened_;
    }

    const std::shared_ptr<Progress>& progress() const { return progress_; }

   private:
    size_t usable() const {
        const size_t most = device_.recommendedMaxWorkingSetSize;
        return most > kReserve ? most - kReserve : most;
    }
    // By this device, or, if that is more, by all of the process.
    size_t taken() const { return std::max<size_t>(allocated_ + mapped_, device_.currentAllocatedSize); }

    // The numbers before the allocation, which would otherwise take the machine's memory until all stands
    // still.
    void check_room(size_t bytes) const {
        const size_t taken = this->taken();
        LILY_CHECK(
            DeviceError, taken + bytes <= usable(),
            "Metal: wanted %.2f GB more, %.2f of the %.2f GB that the GPU may use are taken. Close other "
            "programs, take a shorter prompt, or let the GPU use more of the memory: `sudo sysctl "
            "iogpu.wired_limit_mb=%zu`, of which the rest of the system must be able to spare so much.",
            gigabytes(bytes), gigabytes(taken), gigabytes(usable()),
            (taken + bytes + kReserve) / (size_t{1} << 20) + 1);
    }
    [[noreturn]] void refuse(size_t bytes) const {
        throw DeviceError(format("Metal: the GPU gave no %.2f GB of memory; %.2f GB are taken. Close other "
                                 "programs, or take a shorter prompt.",
                                 gigabytes(bytes), gigabytes(allocated_ + mapped_)));
    }

    void request() {
        if (@available(macOS 15.0, *)) [residency_ requestResidency];
        requested_ = true;
    }

    // Asks for residency between answers, until those have not come for so long.
    void keep() {
        std::unique_lock lock(mutex_);
        while (!closes_) {
            const auto until = used_ + resident_;
            if (Clock::now() >= until) {  // then the system may have the memory, until there is work again
                work_.wait(lock, [&] { return closes_ || used_ + resident_ > until; });
            } else if (work_.wait_for(lock, kBeat, [&] { return closes_; })) {
                return;
            } else if (const auto idle = Clock::now() - used_; idle >= kBeat && idle < resident_) {
                @autoreleasepool {
                    request();
                }
            }
        }
    }

    id<MTLBuffer> of_heap(size_t bytes) {
        for (id<MTLHeap> heap : heaps_)
            if (id<MTLBuffer> buffer = [heap newBufferWithLength:bytes options:kOptions]) return buffer;
        MTLHeapDescriptor* descriptor = [MTLHeapDescriptor new];
        descriptor.size = kHeap;
        descriptor.storageMode = MTLStorageModeShared;
        descriptor.hazardTrackingMode = MTLHazardTrackingModeUntracked;
        id<MTLHeap> heap = [device_ newHeapWithDescriptor:descriptor];
        if (!heap) return nil;
        heap.label = @"lily small";
        heaps_.push_back(heap);
        make_resident(heap);
        return [heap newBufferWithLength:bytes options:kOptions];
    }

    void make_resident(id<MTLAllocation> allocation) {
        if (@available(macOS 15.0, *)) {
            [residency_ addAllocation:allocation];
            changed_ = true;
        }
    }

    // Lets go of what no command buffer uses any more.
    void sweep() {
        const uint64_t completed = progress_->completed();
        while (!retired_.empty() && retired_.front().until <= completed) {
            if (@available(macOS 15.0, *))
                if (retired_.front().resident) {
                    [residency_ removeAllocation:retired_.front().buffer];
                    changed_ = true;
                }
            retired_.pop_front();
        }
    }

    struct Retired {
        uint64_t until;  // the command buffer that may use it last
        id<MTLBuffer> buffer;
        bool resident;  // by itself, not by its heap
    };

    mutable std::mutex mutex_;
    id<MTLDevice> device_;
    id<MTLCommandQueue> queue_;
    const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
    id<MTLResidencySet> residency_ = nil;
    std::vector<id<MTLHeap>> heaps_;
    std::map<const std::byte*, Region> regions_;
    std::deque<Retired> retired_;
    size_t allocated_ = 0, mapped_ = 0;
    uint64_t opened_ = 0;  // number of the latest command buffer

    using Clock = std::chrono::steady_clock;
    const std::chrono::seconds resident_;
    bool changed_ = false, requested_ = false, closes_ = false;
    Clock::time_point used_;        // last, if ever
    std::condition_variable work_;  // or the end
    std::thread keeper_;
};

// The kernels: compiled functions by name, and their pipelines, kept on disk from one process to the next.
class Kernels {
   public:
    Kernels(id<MTLDevice> device, Notice notice) : device_(device), notice_(std::move(notice)) {
        open_archive();
        if (!kMetallib.empty()) {
            dispatch_data_t data = dispatch_data_create(kMetallib.data(), kMetallib.size(), nil,
                                                        DISPATCH_DATA_DESTRUCTOR_DEFAULT);
            add([device newLibraryWithData:data error:nil]);
        }
        if (functions_.empty()) compile();  // also where a metallib is too new for the system
        if (has_tensors(device)) fault_ = compile_tensors();
        notice_ = nullptr;
    }

    id<MTLComputePipelineState> pipeline(const std::string& kernel, uint32_t threads) {
        __strong id<MTLComputePipelineState>& found = pipelines_[kernel];
        if (!found) found = make(kernel);
        LILY_CHECK(DeviceError, threads <= found.maxTotalThreadsPerThreadgroup,
                   "Metal: kernel %s wants %u threads a threadgroup, this GPU runs at most %lu of it. Use "
                   "device=\"cpu\".",
                   kernel.c_str(), threads, static_cast<unsigned long>(found.maxTotalThreadsPerThreadgroup));
        return found;
    }

    bool tensors() const { return tensors_; }
    const std::string& fault() const { return fault_; }  // why tensors() is false on a GPU that has them
    std::vector<std::string> names() const {
        std::vector<std::string> list;
        for (const auto& [name, function] : functions_) list.push_back(name);
        return list;
    }

    // Keeps what was compiled; failing to is no harm.
    void save() {
        if (!archived_ || file_.empty()) return;
        archived_ = false;
        std::error_code ignored;
        std::filesystem::create_directories(std::filesystem::path(file_).parent_path(), ignored);
        const std::string part = file_ + "." + std::to_string(getpid());
        if ([archive_ serializeToURL:[NSURL fileURLWithPath:text(part)] error:nil])
            std::filesystem::rename(part, file_, ignored);
    }

   private:
    bool add(id<MTLLibrary> library) {
        NSArray<NSString*>* names = library.functionNames;
        for (NSUInteger i = 0; i < names.count; ++i)
            functions_[names[i].UTF8String] = [library newFunctionWithName:names[i]];
        return library != nil;
    }

    static bool uses_tensors(const KernelSource& source) { return source.name == "tensors"; }

    void compile() {
        for (const KernelSource& source : kKernelSources) {
            if (uses_tensors(source)) continue;
            const std::string fault = compile(source, MTLLanguageVersion3_1);
            if (!fault.empty())
                throw DeviceError("Metal: the kernels do not compile; use device=\"cpu\", and report this: " +
                                  fault);
        }
    }

    // What is wrong with the kernels of tensor operations; nothing: all of them are ready. A pipeline that
    // fails later could not be done without any more, since the host has chosen its kernels by then.
    std::string compile_tensors() {
#if LILY_HAS_METAL4
        if (@available(macOS 26.0, *)) {
            for (const KernelSource& source : kKernelSources) {
                if (!uses_tensors(source)) continue;
                std::string fault = compile(source, MTLLanguageVersion4_0);
                for (const std::string& kernel : names())
                    if (fault.empty() && kernel.ends_with(kTensorKernels)) try {
                            pipeline(kernel, 1);
                        } catch (const DeviceError& error) {
                            fault = error.what();
                        }
                tensors_ = fault.empty();
                return fault;
            }
        }
#endif
        return "";
    }

    // What is wrong with a source; nothing: it is compiled.
    std::string compile(const KernelSource& source, MTLLanguageVersion version) {
        tell("compiling " + std::string(source.name) + ".metal");
        MTLCompileOptions* options = [MTLCompileOptions new];
        options.languageVersion = version;
        if (@available(macOS 15.0, *))
            options.mathMode = MTLMathModeSafe;
        else
            options.fastMathEnabled = NO;
        NSError* error = nil;
        id<MTLLibrary> library = [device_ newLibraryWithSource:text(std::string(source.text))
                                                       options:options
                                                         error:&error];
        if (!add(library)) return std::string(source.name) + ".metal: " + words(error);
        library.label = text(std::string(source.name));
        return "";
    }

    // Of what a first load takes its time for. Later ones find their pipelines, and the system the sources.
    void tell(const std::string& what) const {
        if (notice_ && first_) notice_("Metal: " + what + ", for the first time on this machine");
    }

    // By what was compiled, for which GPU and by which system.
    void open_archive() {
        std::string all = device_.name.UTF8String;
        all += NSProcessInfo.processInfo.operatingSystemVersionString.UTF8String;
        all += kMetallib;
        for (const KernelSource& source : kKernelSources) all += source.text;
        NSArray<NSString*>* caches =
            NSSearchPathForDirectoriesInDomains(NSCachesDirectory, NSUserDomainMask, YES);
        MTLBinaryArchiveDescriptor* descriptor = [MTLBinaryArchiveDescriptor new];
        if (caches.count) {
            file_ = format("%s/lily/kernels-%zx.metalarchive", caches[0].UTF8String,
                           std::hash<std::string>()(all));
            first_ = !std::filesystem::exists(file_);
            if (!first_) descriptor.url = [NSURL fileURLWithPath:text(file_)];
        }
        archive_ = [device_ newBinaryArchiveWithDescriptor:descriptor error:nil];
        if (archive_) return;
        descriptor.url = nil;  // a damaged one is written anew
        archive_ = [device_ newBinaryArchiveWithDescriptor:descriptor error:nil];
    }

    id<MTLComputePipelineState> make(const std::string& kernel) {
        const auto function = functions_.find(kernel);
        if (function == functions_.end()) throw DeviceError("Metal: there is no kernel " + kernel);
        MTLComputePipelineDescriptor* descriptor = [MTLComputePipelineDescriptor new];
        descriptor.label = text(kernel);
        descriptor.computeFunction = function->second;
        if (archive_) descriptor.binaryArchives = @[ archive_ ];
        const auto build = [&](MTLPipelineOption option, NSError** error) {
            return [device_ newComputePipelineStateWithDescriptor:descriptor
                                                          options:option
                                                       reflection:nil
                                                            error:error];
        };
        id<MTLComputePipelineState> made =
            archive_ ? build(MTLPipelineOptionFailOnBinaryArchiveMiss, nil) : nil;
        NSError* error = nil;
        if (!made) {
            made = build(MTLPipelineOptionNone, &error);
            if (!made) throw DeviceError("Metal: kernel " + kernel + " does not compile: " + words(error));
            if (archive_ && [archive_ addComputePipelineFunctionsWithDescriptor:descriptor error:nil])
                archived_ = true;
        }
        LILY_CHECK(
            DeviceError, made.threadExecutionWidth == 32,
            "Metal: kernel %s: wanted SIMD-groups of 32 threads, this GPU has %lu. Use device=\"cpu\".",
            kernel.c_str(), static_cast<unsigned long>(made.threadExecutionWidth));
        return made;
    }

    id<MTLDevice> device_;
    Notice notice_;  // for as long as this is being made
    id<MTLBinaryArchive> archive_ = nil;
    std::string file_;       // of the archive
    bool first_ = true;      // whether there was none
    bool archived_ = false;  // whether it has more than its file
    bool tensors_ = false;
    std::string fault_;
    std::map<std::string, id<MTLFunction>> functions_;
    std::map<std::string, id<MTLComputePipelineState>> pipelines_;
};

class Metal final : public Device {
   public:
    explicit Metal(const MetalSettings& settings) {
        @autoreleasepool {
            device_ = MTLCreateSystemDefaultDevice();
            if (!device_)
                throw DeviceError(
                    "option device: metal found no GPU, as in a session without a screen or in a virtual "
                    "machine. Use device=\"cpu\".");
            LILY_CHECK(
                DeviceError, serves(device_),
                "option device: metal wants Apple silicon (M1 or later), this is %s. Use device=\"cpu\".",
                device_.name.UTF8String);
            chip_ = chip_of(device_);
            queue_ = [device_ newCommandQueue];
            fence_ = [device_ newFence];
            event_ = [device_ newSharedEvent];
            if (!queue_ || !fence_ || !event_) throw DeviceError("Metal: the GPU gave no command queue");
            queue_.label = @"lily";
            kernels_ = std::make_unique<Kernels>(device_, settings.notice);
            space_ =
                std::make_shared<Space>(device_, queue_, std::chrono::seconds(settings.resident_seconds));
            name_ = std::string("metal (") + device_.name.UTF8String + ")";
            if (kernels_->tensors()) name_ += ", tensor operations";
            if (!kernels_->fault().empty()) {
                name_ += ", no tensor operations: their kernels do not compile";
                if (settings.notice)
                    settings.notice("Metal: goes without tensor operations: " + kernels_->fault());
            }
        }
    }
    Metal(const Metal&) = delete;
    Metal& operator=(const Metal&) = delete;
    ~Metal() override {
        @autoreleasepool {
            commit();
            space_->progress()->wait(space_->opened());
            space_->close();
            kernels_->save();
        }
    }

    std::string name() const override { return name_; }
    bool tensor_operations() const override { return kernels_->tensors(); }
    bool overlaps() const override { return true; }
    std::vector<std::string> compile() override {
        std::vector<std::string> faults;
        @autoreleasepool {
            for (const std::string& kernel : kernels_->names()) try {
                    kernels_->pipeline(kernel, 1);
                } catch (const DeviceError& error) {
                    faults.push_back(error.what());
                }
        }
        return faults;
    }
    double seconds() override { return space_->progress()->seconds(); }
    void admit(size_t bytes) override { space_->admit(bytes); }
    std::optional<size_t> room() const override { return space_->room(); }

    Memory allocate(size_t bytes) override {
        @autoreleasepool {
            return Memory(space_->allocate(bytes), [space = space_](std::byte* p) {
                @autoreleasepool {
                    space->release(p);
                }
            });
        }
    }

    void map(std::span<const std::byte> memory, const std::string& label) override {
        @autoreleasepool {
            space_->map(memory, label);
        }
    }
    bool reads(const void* data, size_t bytes) const override {
        return space_->find(data, bytes).buffer != nil;
    }
    std::byte* address(const void* data) const override {
        const Region region = space_->find(data, 1);
        LILY_CHECK(DeviceError, region.buffer != nil, "Metal: %p is no memory of the GPU's", data);
        return reinterpret_cast<std::byte*>(region.buffer.gpuAddress + region.offset);
    }

    void dispatch(const Dispatch& d) override {
        if (d.groups[0] == 0 || d.groups[1] == 0 || d.groups[2] == 0) return;
        @autoreleasepool {
            check();
            const double seconds = estimate(d);
            if (encoder_ && work_ > 0 && work_ + seconds > chip_.longest) commit();
            id<MTLComputePipelineState> pipeline = kernels_->pipeline(d.kernel, d.threads);
            check_memory(d, pipeline);
            if (!encoder_) begin();
            [encoder_ setComputePipelineState:pipeline];
            [encoder_ setBytes:d.args.data() length:d.args.size() atIndex:0];
            NSUInteger index = 1;
            for (const Binding& b : d.buffers) bind(d, b, index++);
            for (size_t i = 0; i < d.threadgroup.size(); ++i)
                [encoder_ setThreadgroupMemoryLength:(d.threadgroup[i] + 15) / 16 * 16 atIndex:i];
            if (!space_->is_resident()) use(d);
            const MTLSize threads = MTLSizeMake(d.threads, 1, 1);
            if (d.indirect) {
                const Region grid = region(d, d.indirect, sizeof d.groups);
                [encoder_ dispatchThreadgroupsWithIndirectBuffer:grid.buffer
                                            indirectBufferOffset:grid.offset
                                           threadsPerThreadgroup:threads];
            } else {
                [encoder_ dispatchThreadgroups:MTLSizeMake(d.groups[0], d.groups[1], d.groups[2])
                         threadsPerThreadgroup:threads];
            }
            work_ += seconds;
            last_ = d.kernel;
            if (first_.empty()) first_ = d.kernel;
        }
    }

    void barrier() override {
        [encoder_ memoryBarrierWithScope:MTLBarrierScopeBuffers];  // none is open: the fence does it
    }

    uint64_t commit() override {
        @autoreleasepool {
            if (!encoder_) return space_->opened();
            const uint64_t number = space_->opened();
            [encoder_ updateFence:fence_];
            [encoder_ endEncoding];
            [buffer_ encodeSignalEvent:event_ value:number];
            const std::string kernels = first_ == last_ ? first_ : first_ + " to " + last_;
            id<MTLSharedEvent> event = event_;
            const std::shared_ptr<Progress> progress = space_->progress();
            [buffer_ addCompletedHandler:^(id<MTLCommandBuffer> buffer) {
              std::string error;
              if (buffer.status == MTLCommandBufferStatusError) {
                  error = "Metal: kernels " + kernels + ": " + words(buffer.error) + " (" +
                          std::to_string(buffer.error.code) + "). " + advice_on(buffer.error.code);
              }
              progress->complete(number, buffer.GPUStartTime, buffer.GPUEndTime, error);
              if (!error.empty()) event.signaledValue = UINT64_MAX;  // nobody else will
            }];
            space_->settle();
            [buffer_ commit];
            encoder_ = nil;
            buffer_ = nil;
            return number;
        }
    }

    void wait(uint64_t number) override {
        @autoreleasepool {
            if (number == space_->opened()) commit();
            while (![event_ waitUntilSignaledValue:number timeoutMS:kPatience]) check();
            check();
        }
    }

    void finish() override {
        const uint64_t number = commit();
        space_->progress()->wait(number);
        check();
    }

   private:
    void check() const {
        if (const std::string error = space_->progress()->error(); !error.empty()) throw DeviceError(error);
    }

    double estimate(const Dispatch& d) const {
        size_t bytes = 0;
        for (const auto& list : {d.buffers, d.reached})
            for (const Binding& b : list) bytes += b.reads + b.writes;
        const double rate = chip_.rate * static_cast<double>(chip_.cores);
        return kDispatch + std::max(static_cast<double>(bytes) / chip_.bandwidth, d.operations / rate);
    }

    void check_memory(const Dispatch& d, id<MTLComputePipelineState> pipeline) const {
        size_t bytes = pipeline.staticThreadgroupMemoryLength;
        for (uint32_t more : d.threadgroup) bytes += more;
        LILY_CHECK(DeviceError, bytes <= device_.maxThreadgroupMemoryLength,
                   "Metal: kernel %s needs %zu bytes of threadgroup memory, this GPU has %lu. Use "
                   "device=\"cpu\".",
                   d.kernel.c_str(), bytes, static_cast<unsigned long>(device_.maxThreadgroupMemoryLength));
    }

    void begin() {
        MTLCommandBufferDescriptor* descriptor = [MTLCommandBufferDescriptor new];
        descriptor.retainedReferences = NO;
        descriptor.errorOptions = MTLCommandBufferErrorOptionEncoderExecutionStatus;
        buffer_ = [queue_ commandBufferWithDescriptor:descriptor];
        encoder_ = [buffer_ computeCommandEncoderWithDispatchType:MTLDispatchTypeConcurrent];
        if (!encoder_) throw DeviceError("Metal: the GPU gave no command buffer. Load the model again.");
        const uint64_t number = space_->open();
        buffer_.label = text("lily " + std::to_string(number));
        encoder_.label = buffer_.label;
        [encoder_ waitForFence:fence_];
        work_ = 0;
        first_.clear();
    }

    Region region(const Dispatch& d, const void* data, size_t bytes) const {
        const Region found = space_->find(data, bytes);
        LILY_CHECK(DeviceError, found.buffer != nil,
                   "Metal: kernel %s: %zu bytes at %p are no memory of the GPU's", d.kernel.c_str(), bytes,
                   data);
        return found;
    }

    void bind(const Dispatch& d, const Binding& b, NSUInteger index) {
        if (!b.data) {
            [encoder_ setBuffer:nil offset:0 atIndex:index];
            return;
        }
        const Region found = region(d, b.data, b.bytes);
        [encoder_ setBuffer:found.buffer offset:found.offset atIndex:index];
    }

    // Without residency sets every encoder has to name what its kernels reach by address.
    void use(const Dispatch& d) {
        for (const Binding& b : d.reached)
            [encoder_
                useResource:region(d, b.data, b.bytes).buffer
                      usage:b.written ? MTLResourceUsageRead | MTLResourceUsageWrite : MTLResourceUsageRead];
    }

    id<MTLDevice> device_ = nil;
    Chip chip_ = kChips[0];
    id<MTLCommandQueue> queue_ = nil;
    id<MTLFence> fence_ = nil;
    id<MTLSharedEvent> event_ = nil;
    std::unique_ptr<Kernels> kernels_;
    std::shared_ptr<Space> space_;
    std::string name_;

    // The command buffer that is being filled, if any.
    id<MTLCommandBuffer> buffer_ = nil;
    id<MTLComputeCommandEncoder> encoder_ = nil;
    double work_ = 0;           // seconds that it should take
    std::string first_, last_;  // of its kernels
};

}  // namespace

bool has_metal(const std::string&) {
    @autoreleasepool {
        id<MTLDevice> device = MTLCreateSystemDefaultDevice();
        return device && serves(device);
    }
}

std::string metal_facts(const std::string&) {
    @autoreleasepool {
        id<MTLDevice> device = MTLCreateSystemDefaultDevice();
        if (!device) return "";
        const Chip chip = chip_of(device);
        bool sets = false;
        if (@available(macOS 15.0, *)) sets = true;
        const auto megabytes = [](uint64_t bytes) { return static_cast<unsigned long>(bytes >> 20); };
        return format(
            "GPU: %s\nsystem: %s\nGPU family: %ld\nGPU cores: %ld\nserves: %s\ntensor operations: %s\n"
            "the GPU may use: %lu MB, of which %lu are left to others\nlongest buffer: %lu MB\n"
            "residency sets: %s\nkernels: %s\ncommand buffers: at most %.0f ms at %.0f GB/s and %.1f "
            "TFLOP/s\n",
            device.name.UTF8String, NSProcessInfo.processInfo.operatingSystemVersionString.UTF8String,
            static_cast<long>(chip.family), chip.cores,
            serves(device) ? "yes" : "no, Apple silicon is wanted", has_tensors(device) ? "yes" : "no",
            megabytes(device.recommendedMaxWorkingSetSize), megabytes(kReserve),
            megabytes(device.maxBufferLength), sets ? "yes" : "no",
            kMetallib.empty() ? "compiled from source when first loaded" : "compiled ahead",
            1e3 * chip.longest, chip.bandwidth / 1e9, chip.rate * static_cast<double>(chip.cores) / 1e12);
    }
}

std::unique_ptr<Device> make_metal(const MetalSettings& settings) {
    return std::make_unique<Metal>(settings);
}

}  // namespace lily
