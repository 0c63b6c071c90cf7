// CUDA: a Device over the driver's interface, which is loaded when it is asked for, so that neither building
// nor importing needs CUDA. The kernels are PTX that tools/metal/cuda.py made of metal/*.metal, which the
// driver compiles for the GPU at hand.
//
// One stream takes every dispatch in order, so a barrier is what the stream does anyhow.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
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
enum : int { kMajor = 75, kMinor = 76 };           // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
enum : int { kErrorLog = 5, kErrorLogBytes = 6 };  // CU_JIT_*

constexpr size_t kArguments = 256;  // bytes of msl_arguments, tools/metal/language/cuda.h

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
    X(cuMemFree_v2, (Address))                                                                               \
    X(cuMemsetD8Async, (Address, unsigned char, size_t, Handle))                                             \
    X(cuMemcpyAsync, (Address, Address, size_t, Handle))                                                     \
    X(cuMemcpyHtoDAsync_v2, (Address, const void*, size_t, Handle))                                          \
    X(cuStreamCreate, (Handle*, unsigned))                                                                   \
    X(cuStreamDestroy_v2, (Handle))                                                                          \
    X(cuStreamSynchronize, (Handle))                                                                         \
    X(cuModuleLoadDataEx, (Handle*, const void*, unsigned, int*, void**))                                    \
    X(cuModuleUnload, (Handle))                                                                              \
    X(cuModuleGetFunction, (Handle*, Handle, const char*))                                                   \
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

std::string contents(const std::string& file) {
    std::ifstream stream(file, std::ios::binary);
    std::ostringstream text;
    if (!file.empty()) text << stream.rdbuf();
    if (!stream || text.str().empty())
        throw DeviceError("option kernels: wanted the kernels' PTX, made by `make ptx`, got '" + file + "'");
    return text.str();
}

class Cuda final : public Device {
   public:
    explicit Cuda(const std::string& file) : context_(std::make_shared<Context>()) {
        const int major = context_->attribute(kMajor);
        LILY_CHECK(
            DeviceError, major >= 8,
            "option device: cuda wants compute capability 8.0 or later (Ampere), this GPU has %d.%d. Use "
            "device=\"cpu\".",
            major, context_->attribute(kMinor));
        char name[128] = "";
        check(d_.cuDeviceGetName(name, sizeof name, context_->number), "its name");
        name_ = std::string("cuda (") + name + ")";
        const std::string ptx = contents(file);
        std::array<char, 4096> log = {};
        int options[] = {kErrorLog, kErrorLogBytes};
        void* values[] = {log.data(), reinterpret_cast<void*>(log.size())};
        if (const Result r = d_.cuModuleLoadDataEx(&module_, ptx.c_str(), 2, options, values))
            throw DeviceError("CUDA: " + file + " does not compile: " + d_.says(r) + ". " + log.data());
        check(d_.cuStreamCreate(&stream_, 1), "a stream");  // 1: it does not wait for other users of the GPU
    }
    Cuda(const Cuda&) = delete;
    Cuda& operator=(const Cuda&) = delete;
    ~Cuda() override {
        d_.cuCtxSetCurrent(context_->handle);
        d_.cuStreamSynchronize(stream_);
        d_.cuStreamDestroy_v2(stream_);
        d_.cuModuleUnload(module_);
    }

    std::string name() const override { return name_; }
    bool host_reads() const override { return false; }

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

    void dispatch(const Dispatch& d) override {
        context_->enter();
        std::array<std::byte, kArguments> arguments;
        LILY_CHECK(DeviceError, d.args.size() <= arguments.size(),
                   "%s: has %zu bytes of arguments, at most %zu", d.kernel.c_str(), d.args.size(),
                   arguments.size());
        std::copy(d.args.begin(), d.args.end(), arguments.begin());
        std::array<Address, 32> addresses;
        std::array<unsigned, 8> places;
        std::array<void*, 48> parameters;
        size_t count = 0, at = 0;
        unsigned shared = 0;
        parameters[count++] = arguments.data();
        for (const Binding& b : d.buffers) {
            addresses[at] = reinterpret_cast<Address>(b.data);
            parameters[count++] = &addresses[at++];
        }
        for (size_t i = 0; i < d.threadgroup.size(); ++i) {
            places[i] = shared;
            shared += (d.threadgroup[i] + 15) / 16 * 16;
            parameters[count++] = &places[i];
        }
        addresses[at] = reinterpret_cast<Address>(d.indirect);
        parameters[count++] = &addresses[at];
        check(d_.cuLaunchKernel(function(d.kernel), d.groups[0], d.groups[1], d.groups[2], d.threads, 1, 1,
                                shared, stream_, parameters.data(), nullptr),
              d.kernel);
    }

    void barrier() override {}  // the stream's order

    void copy(void* to, const void* from, size_t bytes) override {
        context_->enter();
        check(
            d_.cuMemcpyAsync(reinterpret_cast<Address>(to), reinterpret_cast<Address>(from), bytes, stream_),
            "a copy");
        finish();
    }
    void write(void* to, const void* from, size_t bytes) override {
        context_->enter();
        check(d_.cuMemcpyHtoDAsync_v2(reinterpret_cast<Address>(to), from, bytes, stream_),
              "a copy to the GPU");
    }
    void finish() override {
        context_->enter();
        check(d_.cuStreamSynchronize(stream_), "work on the GPU");
    }

   private:
    Handle function(const std::string& kernel) {
        Handle& found = functions_[kernel];
        if (!found)
            if (const Result r = d_.cuModuleGetFunction(&found, module_, kernel.c_str()))
                throw DeviceError("CUDA: there is no kernel " + kernel + ": " + d_.says(r));
        return found;
    }

    const Driver& d_ = driver();
    std::shared_ptr<Context> context_;
    std::string name_;
    Handle module_ = nullptr, stream_ = nullptr;
    std::map<std::string, Handle> functions_;
};

}  // namespace

std::unique_ptr<Device> make_cuda(const std::string& file) {
    return std::make_unique<Cuda>(file);
}

}  // namespace lily
