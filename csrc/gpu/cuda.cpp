// CUDA: a Device over the driver's interface, which is loaded when it is asked for, so that neither building
// nor importing needs CUDA. The kernels are PTX that tools/metal/cuda.py made of metal/*.metal, which the
// driver compiles for the GPU at hand.
//
// One stream takes every dispatch in order, so a barrier is what the stream does anyhow. What lies between
// two commits is launched at once: as a graph, if the same kernels came in the same order before, whose nodes
// then only get the arguments that differ.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <numeric>
#include <sstream>
#include <utility>
#include <vector>

#include "error.h"
#include "gpu/device.h"

namespace lily {

namespace {

// The part of cuda.h that is used, by the driver's documented binary interface.
using Result = int;
using DeviceNumber = int;
using Address = unsigned long long;
using Handle = void*;
enum : int { kSuccess = 0, kOutOfMemory = 2 };
enum : int { kMajor = 75, kMinor = 76 };  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
enum : int { kProcessors = 16 };          // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
enum : int { kMostShared = 97 };          // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
enum : int { kFixedShared = 1, kDynamicShared = 8, kCarveout = 9 };  // CU_FUNC_ATTRIBUTE_*
enum : int { kErrorLog = 5, kErrorLogBytes = 6 };                    // CU_JIT_*

struct Node {  // CUDA_KERNEL_NODE_PARAMS
    Handle function;
    unsigned groups[3], threads[3], shared;
    void** parameters;
    void** extra;
    Handle kernel, context;
};

constexpr int kLeastMajor = 8;            // compute capability: Ampere
constexpr size_t kMostDispatches = 1024;  // of a graph
constexpr size_t kGraphs = 8;             // that are kept
constexpr size_t kArguments = 256;        // bytes of msl_arguments, tools/metal/language/cuda.h

struct Driver {
#define LILY_DRIVER(X)                                                                                       \
    X(cuInit, (unsigned))                                                                                    \
    X(cuDeviceGet, (DeviceNumber*, int))                                                                     \
    X(cuDeviceGetName, (char*, int, DeviceNumber))                                                           \
    X(cuDeviceGetAttribute, (int*, int, DeviceNumber))                                                       \
    X(cuDevicePrimaryCtxRetain, (Handle*, DeviceNumber))                                                     \
    X(cuDevicePrimaryCtxRelease_v2, (DeviceNumber))                                                          \
    X(cuCtxSetCurrent, (Handle))                                                                             \
    X(cuMemGetInfo_v2, (size_t*, size_t*))                                                                   \
    X(cuMemAlloc_v2, (Address*, size_t))                                                                     \
    X(cuMemHostAlloc, (void**, size_t, unsigned))                                                            \
    X(cuMemFreeHost, (void*))                                                                                \
    X(cuMemFree_v2, (Address))                                                                               \
    X(cuMemsetD8Async, (Address, unsigned char, size_t, Handle))                                             \
    X(cuMemcpyAsync, (Address, Address, size_t, Handle))                                                     \
    X(cuMemcpyHtoDAsync_v2, (Address, const void*, size_t, Handle))                                          \
    X(cuStreamCreate, (Handle*, unsigned))                                                                   \
    X(cuStreamDestroy_v2, (Handle))                                                                          \
    X(cuStreamSynchronize, (Handle))                                                                         \
    X(cuEventCreate, (Handle*, unsigned))                                                                    \
    X(cuEventDestroy_v2, (Handle))                                                                           \
    X(cuEventRecord, (Handle, Handle))                                                                       \
    X(cuEventSynchronize, (Handle))                                                                          \
    X(cuEventElapsedTime, (float*, Handle, Handle))                                                          \
    X(cuGraphCreate, (Handle*, unsigned))                                                                    \
    X(cuGraphDestroy, (Handle))                                                                              \
    X(cuGraphAddKernelNode_v2, (Handle*, Handle, const Handle*, size_t, const Node*))                        \
    X(cuGraphInstantiateWithFlags, (Handle*, Handle, unsigned long long))                                    \
    X(cuGraphExecKernelNodeSetParams_v2, (Handle, Handle, const Node*))                                      \
    X(cuGraphExecDestroy, (Handle))                                                                          \
    X(cuGraphLaunch, (Handle, Handle))                                                                       \
    X(cuModuleLoadDataEx, (Handle*, const void*, unsigned, int*, void**))                                    \
    X(cuModuleUnload, (Handle))                                                                              \
    X(cuModuleGetFunction, (Handle*, Handle, const char*))                                                   \
    X(cuFuncGetAttribute, (int*, int, Handle))                                                               \
    X(cuFuncSetAttribute, (Handle, int, int))                                                                \
    X(cuLaunchKernel, (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, \
                       void**, void**))                                                                      \
    X(cuGetErrorName, (Result, const char**))                                                                \
    X(cuGetErrorString, (Result, const char**))
#define LILY_FUNCTION(name, parameters) Result(*name) parameters = nullptr;
    LILY_DRIVER(LILY_FUNCTION)
#undef LILY_FUNCTION
    std::string fault;  // why it can't be used

    Driver() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // stays for the process, as it must
        if (!library) {
            fault = "there is no libcuda.so.1; install NVIDIA's driver";
            return;
        }
#define LILY_FUNCTION(name, parameters)                             \
    name = reinterpret_cast<decltype(name)>(dlsym(library, #name)); \
    if (!name) fault = "libcuda.so.1 has no " #name "; install a driver of CUDA 12";
        LILY_DRIVER(LILY_FUNCTION)
#undef LILY_FUNCTION
        if (fault.empty())
            if (const Result r = cuInit(0)) fault = says(r);
    }

    std::string says(Result r) const {
        const char *name = nullptr, *text = nullptr;
        cuGetErrorName(r, &name);
        cuGetErrorString(r, &text);
        return std::string(name ? name : "error") + ", " + (text ? text : std::to_string(r).c_str());
    }
};

const Driver& driver() {
    static const Driver loaded;
    return loaded;
}

void check(Result r, const std::string& what) {
    if (r == kSuccess) return;
    throw DeviceError("CUDA: " + what + ": " + driver().says(r) +
                      (r == kOutOfMemory ? ". Free GPU memory, or use device=\"cpu\"." : ""));
}

// The GPU's context, held by the device and by all memory that came from it.
struct Context {
    Handle handle = nullptr;
    DeviceNumber number = 0;
    Context() {
        const Driver& d = driver();
        if (!d.fault.empty()) throw DeviceError("option device: cuda cannot be used: " + d.fault + ".");
        check(d.cuDeviceGet(&number, 0), "the first GPU");
        check(d.cuDevicePrimaryCtxRetain(&handle, number), "its context");
        enter();
    }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;
    ~Context() { driver().cuDevicePrimaryCtxRelease_v2(number); }
    void enter() const { check(driver().cuCtxSetCurrent(handle), "its context"); }
    int attribute(int which) const {
        int value = 0;
        check(driver().cuDeviceGetAttribute(&value, which, number), "its abilities");
        return value;
    }
};

// The PTX that the package brings along: kernels.ptx beside the library that this is.
std::string packaged() {
    Dl_info here = {};
    if (!dladdr(reinterpret_cast<void*>(&packaged), &here) || !here.dli_fname) return "";
    return (std::filesystem::path(here.dli_fname).parent_path() / "kernels.ptx").string();
}

std::string contents(const std::string& given) {
    const std::string file = given.empty() ? packaged() : given;
    std::ifstream stream(file, std::ios::binary);
    std::ostringstream text;
    if (!file.empty()) text << stream.rdbuf();
    if (stream && !text.str().empty()) return text.str();
    if (given.empty())
        throw DeviceError(
            "option device: cuda cannot be used: this build of Lily has no kernels for NVIDIA GPUs, since no "
            "clang 22 was there to compile them. Build it where `make toolchain` ran, or pass what "
            "`make ptx` makes as kernels=\"build/kernels.ptx\".");
    throw DeviceError("option kernels: wanted the kernels' PTX, made by `make ptx`, got '" + file + "'");
}

class Cuda final : public Device {
   public:
    explicit Cuda(const std::string& file) : context_(std::make_shared<Context>()) {
        const int major = context_->attribute(kMajor);
        LILY_CHECK(
            DeviceError, major >= kLeastMajor,
            "option device: cuda wants compute capability 8.0 or later (Ampere), this GPU has %d.%d. Use "
            "device=\"cpu\".",
            major, context_->attribute(kMinor));
        char name[128] = "";
        check(d_.cuDeviceGetName(name, sizeof name, context_->number), "its name");
        name_ = std::string("cuda (") + name + ")";
        const std::string code = contents(file);
        std::array<char, 4096> log = {};
        int options[] = {kErrorLog, kErrorLogBytes};
        void* values[] = {log.data(), reinterpret_cast<void*>(log.size())};
        if (const Result r = d_.cuModuleLoadDataEx(&module_, code.c_str(), 2, options, values))
            throw DeviceError("CUDA: the kernels " + (file.empty() ? packaged() : file) +
                              " do not compile: " + d_.says(r) + ". " + log.data());
        check(d_.cuStreamCreate(&stream_, 1), "a stream");  // 1: it does not wait for other users of the GPU
        for (Span& span : spans_) {
            check(d_.cuEventCreate(&span.begin, 0), "an event");
            check(d_.cuEventCreate(&span.end, 0), "an event");
        }
    }
    Cuda(const Cuda&) = delete;
    Cuda& operator=(const Cuda&) = delete;
    ~Cuda() override {
        d_.cuCtxSetCurrent(context_->handle);
        d_.cuStreamSynchronize(stream_);
        graphs_.clear();
        for (const Span& span : spans_) {
            d_.cuEventDestroy_v2(span.begin);
            d_.cuEventDestroy_v2(span.end);
        }
        d_.cuStreamDestroy_v2(stream_);
        d_.cuModuleUnload(module_);
    }

    std::string name() const override { return name_; }
    bool host_reads() const override { return false; }
    uint32_t threadgroups_at_once() const override {  // tools/metal/cuda.py: registers for 512 threads
        return 2 * static_cast<uint32_t>(context_->attribute(kProcessors));
    }

    uint32_t simds_of_row() const override { return 16; }
    Tiling tiling() const override {
        return {.outputs = 128,
                .threads_of_few = 128,
                .bytes = 0,
                .bytes_of_row = 4 * 128,
                .threadgroups = static_cast<uint32_t>(context_->attribute(kProcessors))};
    }
    uint32_t flash_landing(uint32_t head_dim) const override {  // 4 (Panel<16, Dh> and Panel<64, Dh / 4>)
        return 4 * (16 * (head_dim + 8) + 64 * (head_dim / 4 + 8)) * 2;
    }
    const char* gdn_scan() const override { return "packed"; }

    Memory allocate(size_t bytes) override {
        context_->enter();
        Address address = 0;
        const size_t whole = std::max<size_t>(bytes, 16);
        check(d_.cuMemAlloc_v2(&address, whole), std::to_string(whole) + " bytes of memory");
        Memory memory(reinterpret_cast<std::byte*>(address), [context = context_](std::byte* p) {
            driver().cuCtxSetCurrent(context->handle);
            driver().cuMemFree_v2(reinterpret_cast<Address>(p));
        });
        check(d_.cuMemsetD8Async(address, 0, whole, stream_), "clearing memory");
        return memory;
    }

    Memory allocate_shared(size_t bytes) override {
        context_->enter();
        void* p = nullptr;
        check(d_.cuMemHostAlloc(&p, bytes, 0), std::to_string(bytes) + " bytes of shared memory");
        std::memset(p, 0, bytes);
        return Memory(static_cast<std::byte*>(p), [context = context_](std::byte* memory) {
            driver().cuCtxSetCurrent(context->handle);
            driver().cuMemFreeHost(memory);
        });
    }

    void dispatch(const Dispatch& d) override {
        context_->enter();
        LILY_CHECK(DeviceError, d.args.size() <= kArguments && d.buffers.size() < kAddresses,
                   "%s: has %zu bytes of arguments and %zu buffers, at most %zu and %zu", d.kernel.c_str(),
                   d.args.size(), d.buffers.size(), kArguments, kAddresses - 1);
        const Kernel& kernel = function(d.kernel);
        Launch& launch = pass_.emplace_back();
        launch.kernel = &kernel;
        std::copy(std::begin(d.groups), std::end(d.groups), launch.groups);
        launch.threads = d.threads;
        std::copy(d.args.begin(), d.args.end(), launch.arguments.begin());
        for (const Binding& b : d.buffers)
            launch.addresses[launch.count++] = reinterpret_cast<Address>(b.data);
        for (const uint32_t bytes : d.threadgroup) {
            launch.places[launch.place_count++] = launch.shared;
            launch.shared += (bytes + 15) / 16 * 16;
        }
        launch.addresses[launch.count++] = reinterpret_cast<Address>(d.indirect);
        if (pass_.size() == kMostDispatches) commit();
    }

    // A pass that cannot be launched is let go of, so that the next one begins with its own dispatches.
    uint64_t commit() override {
        if (pass_.empty()) return committed_;
        const Emptied after(pass_);
        context_->enter();
        Span& span = spans_[++committed_ % spans_.size()];
        measure(span);  // of long ago
        span.kernels = pass_.front().kernel->name + " to " + pass_.back().kernel->name;
        check(d_.cuEventRecord(span.begin, stream_), "an event");
        launch();
        check(d_.cuEventRecord(span.end, stream_), "an event");
        span.open = true;
        return committed_;
    }

    void wait(uint64_t number) override {
        context_->enter();
        if (number == committed_ && !pass_.empty()) commit();
        if (number == 0) return;
        Span& span = spans_[number % spans_.size()];
        check(d_.cuEventSynchronize(span.end), "kernels " + span.kernels);
    }

    bool overlaps() const override { return true; }

    double seconds() override {
        finish();
        for (Span& span : spans_) measure(span);
        return std::exchange(seconds_, 0);
    }

    void barrier() override {}  // the stream's order

    void copy(void* to, const void* from, size_t bytes) override {
        commit();
        context_->enter();
        check(
            d_.cuMemcpyAsync(reinterpret_cast<Address>(to), reinterpret_cast<Address>(from), bytes, stream_),
            "a copy");
        finish();
    }
    void write(void* to, const void* from, size_t bytes) override {
        commit();
        context_->enter();
        check(d_.cuMemcpyHtoDAsync_v2(reinterpret_cast<Address>(to), from, bytes, stream_),
              "a copy to the GPU");
    }
    void finish() override {
        commit();
        context_->enter();
        check(d_.cuStreamSynchronize(stream_), "work on the GPU");
    }

   private:
    static constexpr size_t kAddresses = 32;

    struct Kernel {
        std::string name;
        Handle function = nullptr;
    };

    // A dispatch as the driver takes it.
    struct Launch {
        const Kernel* kernel = nullptr;
        unsigned groups[3] = {}, threads = 0, shared = 0;
        unsigned count = 0, place_count = 0;
        std::array<std::byte, kArguments> arguments = {};
        std::array<Address, kAddresses> addresses = {};
        std::array<unsigned, 8> places = {};

        bool operator==(const Launch&) const = default;

        std::array<void*, 1 + kAddresses + 8> parameters() {
            std::array<void*, 1 + kAddresses + 8> list = {};
            size_t n = 0;
            list[n++] = arguments.data();
            for (unsigned i = 0; i + 1 < count; ++i) list[n++] = &addresses[i];
            for (unsigned i = 0; i < place_count; ++i) list[n++] = &places[i];
            list[n++] = &addresses[count - 1];  // of an indirect grid
            return list;
        }
    };

    // Empties a list when it goes out of scope.
    struct Emptied {
        std::vector<Launch>& list;
        explicit Emptied(std::vector<Launch>& of) : list(of) {}
        Emptied(const Emptied&) = delete;
        Emptied& operator=(const Emptied&) = delete;
        ~Emptied() { list.clear(); }
    };

    struct Graph {
        std::vector<Launch> launches;
        std::vector<Handle> nodes;
        Handle graph = nullptr, executable = nullptr;
        Graph() = default;
        Graph(Graph&& other) noexcept { *this = std::move(other); }
        Graph& operator=(Graph&& other) noexcept {
            std::swap(launches, other.launches);
            std::swap(nodes, other.nodes);
            std::swap(graph, other.graph);
            std::swap(executable, other.executable);
            return *this;
        }
        ~Graph() {  // in whose context the caller is
            if (executable) driver().cuGraphExecDestroy(executable);
            if (graph) driver().cuGraphDestroy(graph);
        }
    };

    struct Span {
        Handle begin = nullptr, end = nullptr;  // events
        std::string kernels;
        bool open = false;  // whether its time is not counted yet
    };

    static bool same_kernels(std::span<const Launch> a, std::span<const Launch> b) {
        return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                          [](const Launch& x, const Launch& y) { return x.kernel == y.kernel; });
    }

    Node node_of(Launch& launch, void** parameters) const {
        return {launch.kernel->function,
                {launch.groups[0], launch.groups[1], launch.groups[2]},
                {launch.threads, 1, 1},
                launch.shared,
                parameters,
                nullptr,
                nullptr,
                nullptr};
    }

    // Two passes that hand over to each other differ in their slots, so of the graphs with these kernels, the
    // one that differs least is taken.
    void launch() {
        Graph* best = nullptr;
        std::ptrdiff_t least = 0;
        size_t alike = 0;
        for (Graph& graph : graphs_) {
            if (!same_kernels(graph.launches, pass_)) continue;
            ++alike;
            const auto same = std::inner_product(pass_.begin(), pass_.end(), graph.launches.begin(),
                                                 std::ptrdiff_t{0}, std::plus<>(), std::equal_to<>());
            const auto differ = static_cast<std::ptrdiff_t>(pass_.size()) - same;
            if (!best || differ < least) best = &graph, least = differ;
        }
        const bool again = same_kernels(before_, pass_);
        if (!best && !again) {
            for (Launch& one : pass_) {
                auto list = one.parameters();
                check(d_.cuLaunchKernel(one.kernel->function, one.groups[0], one.groups[1], one.groups[2],
                                        one.threads, 1, 1, one.shared, stream_, list.data(), nullptr),
                      one.kernel->name);
            }
            before_.swap(pass_);
            return;
        }
        if (!best || (alike == 1 && least > static_cast<std::ptrdiff_t>(pass_.size() / 2))) {
            best = &make_graph();
        } else {
            for (size_t i = 0; i < pass_.size(); ++i) {
                if (best->launches[i] == pass_[i]) continue;
                auto list = pass_[i].parameters();
                const Node node = node_of(pass_[i], list.data());
                check(d_.cuGraphExecKernelNodeSetParams_v2(best->executable, best->nodes[i], &node),
                      pass_[i].kernel->name);
                best->launches[i] = pass_[i];
            }
        }
        check(d_.cuGraphLaunch(best->executable, stream_), "a graph of kernels");
    }

    Graph& make_graph() {
        if (graphs_.size() == kGraphs) graphs_.erase(graphs_.begin());
        Graph made;
        made.launches = pass_;
        check(d_.cuGraphCreate(&made.graph, 0), "a graph");
        for (Launch& one : made.launches) {
            auto list = one.parameters();
            const Node node = node_of(one, list.data());
            Handle handle = nullptr;
            const Handle* before = made.nodes.empty() ? nullptr : &made.nodes.back();
            check(d_.cuGraphAddKernelNode_v2(&handle, made.graph, before, before != nullptr, &node),
                  one.kernel->name);
            made.nodes.push_back(handle);
        }
        check(d_.cuGraphInstantiateWithFlags(&made.executable, made.graph, 0), "a graph");
        return graphs_.emplace_back(std::move(made));
    }

    void measure(Span& span) {
        if (!std::exchange(span.open, false)) return;
        float milliseconds = 0;
        check(d_.cuEventSynchronize(span.end), "kernels " + span.kernels);
        check(d_.cuEventElapsedTime(&milliseconds, span.begin, span.end), "a time");
        seconds_ += static_cast<double>(milliseconds) / 1e3;
    }

    const Kernel& function(const std::string& kernel) {
        Kernel& found = functions_[kernel];
        if (found.function) return found;
        found.name = kernel;
        if (const Result r = d_.cuModuleGetFunction(&found.function, module_, kernel.c_str())) {
            functions_.erase(kernel);
            throw DeviceError("CUDA: there is no kernel " + kernel + ": " + d_.says(r));
        }
        // All of an SM's shared memory for every kernel: another division of it waits until the SM is empty.
        int fixed = 0;
        check(d_.cuFuncGetAttribute(&fixed, kFixedShared, found.function), kernel);
        check(d_.cuFuncSetAttribute(found.function, kDynamicShared, context_->attribute(kMostShared) - fixed),
              kernel);
        check(d_.cuFuncSetAttribute(found.function, kCarveout, 100), kernel);
        return found;
    }

    const Driver& d_ = driver();
    std::shared_ptr<Context> context_;
    std::string name_;
    Handle module_ = nullptr, stream_ = nullptr;
    std::map<std::string, Kernel> functions_;  // which stay where they are
    std::vector<Launch> pass_, before_;        // since the last commit; what was launched without a graph
    std::vector<Graph> graphs_;
    std::array<Span, 4> spans_;
    uint64_t committed_ = 0;
    double seconds_ = 0;
};

}  // namespace

bool has_cuda(const std::string& file) {
    if (file.empty() && !std::filesystem::exists(packaged())) return false;
    const Driver& d = driver();
    DeviceNumber number = 0;
    int major = 0;
    return d.fault.empty() && d.cuDeviceGet(&number, 0) == kSuccess &&
           d.cuDeviceGetAttribute(&major, kMajor, number) == kSuccess && major >= kLeastMajor;
}

std::unique_ptr<Device> make_cuda(const std::string& file) {
    return std::make_unique<Cuda>(file);
}

}  // namespace lily
