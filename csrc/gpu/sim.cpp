// The simulator: a Device that runs kernels which tools/metal compiled for the CPU. Dispatches between two
// barriers wait for the second and then run in the reverse of their order, as a GPU might run them. With an
// instrumented library it holds every dispatch to what it declared, and every pair of dispatches without a
// barrier between them to memory that they really may touch side by side.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "error.h"
#include "gpu/device.h"
#include "tools/metal/runtime.h"

namespace lily {

namespace {

using metal::Launch;
using metal::Library;

class Simulator final : public Device {
   public:
    explicit Simulator(const std::string& file)
        : handle_(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL), dlclose) {
        LILY_CHECK(DeviceError, !file.empty(), "%s",
                   "option kernels: wanted the library that `make kernels` builds, got none; "
                   "pass kernels=\"build/kernels.so\"");
        if (!handle_)
            throw DeviceError(std::string("option kernels: wanted a library made by `make kernels`: ") +
                              dlerror());
        const auto open = reinterpret_cast<const Library* (*)()>(dlsym(handle_.get(), "lily_metal_library"));
        if (!open)
            throw DeviceError("option kernels: " + file + " holds no kernels; make it with `make kernels`");
        library_ = open();
        LILY_CHECK(DeviceError, library_->version == metal::kVersion,
                   "%s: wanted version %u of the runtime, got %u. Run `make kernels`.", file.c_str(),
                   metal::kVersion, library_->version);
        for (uint32_t i = 0; i < library_->kernel_count; ++i) kernels_[library_->kernels[i].name] = i;
    }

    std::string name() const override { return "sim"; }
    bool tensor_operations() const override {
        return std::any_of(kernels_.begin(), kernels_.end(),
                           [](const auto& kernel) { return kernel.first.ends_with(kTensorKernels); });
    }

    Memory allocate(size_t bytes) override {
        const size_t whole = std::max<size_t>(64, (bytes + 63) / 64 * 64);
        auto* p = static_cast<std::byte*>(std::aligned_alloc(64, whole));
        if (!p) throw std::bad_alloc();
        std::memset(p, 0, whole);
        return Memory(p, std::free);
    }

    void dispatch(const Dispatch& d) override { waiting_.emplace_back(d); }

    void execute(const Dispatch& d) {
        const auto kernel = kernels_.find(d.kernel);
        if (kernel == kernels_.end()) throw DeviceError("simulator: there is no kernel " + d.kernel);
        std::vector<metal::Binding> bindings;
        const auto bind = [&](uint32_t index, const void* data, size_t bytes, bool written) {
            bindings.push_back({index, written, const_cast<void*>(data), bytes});
        };
        uint32_t index = 0;
        bind(index++, d.args.data(), d.args.size(), false);
        for (const Binding& b : d.buffers) bind(index++, b.data, b.bytes, b.written);
        index = metal::kBuffers;  // what a kernel reaches by address has no slot of its own
        for (const Binding& b : d.reached) bind(index++, b.data, b.bytes, b.written);

        Launch launch;
        launch.kernel = kernel->second;
        std::copy_n(d.groups, 3, launch.groups);
        launch.indirect = d.indirect;
        launch.threads[0] = d.threads;
        launch.bindings = bindings.data();
        launch.binding_count = static_cast<uint32_t>(bindings.size());
        launch.threadgroup_bytes = d.threadgroup.data();
        launch.threadgroup_count = static_cast<uint32_t>(d.threadgroup.size());
        const std::unique_ptr<metal::Result, decltype(library_->release)> result(library_->dispatch(&launch),
                                                                                 library_->release);
        if (result->finding_count) throw DeviceError(d.kernel + ": " + result->findings[0].message);
        if (library_->instrumented) check_stage(d.kernel, bindings, *result);
        if (recorded_) record(d, bindings, *result);
    }

    std::vector<RecordedDispatch> recorded() override {
        run_waiting();
        std::vector<RecordedDispatch> done = recorded_.value_or(std::vector<RecordedDispatch>());
        recorded_.emplace();
        return done;
    }

    void barrier() override {
        run_waiting();
        if (barriers_++ != dropped_) stage_.clear();
        ++stages_;
    }
    void finish() override {
        run_waiting();
        if (!stage_.empty()) ++stages_;
        stage_.clear();
    }
    void drop_barrier(int64_t number) override { dropped_ = number < 0 ? -1 : barriers_ + number; }

   private:
    // A dispatch with what it points to.
    class Waiting {
       public:
        explicit Waiting(const Dispatch& d)
            : dispatch_(d),
              args_(d.args.begin(), d.args.end()),
              buffers_(d.buffers.begin(), d.buffers.end()),
              threadgroup_(d.threadgroup.begin(), d.threadgroup.end()),
              reached_(d.reached.begin(), d.reached.end()) {}

        Dispatch dispatch() const {
            Dispatch d = dispatch_;
            d.args = args_;
            d.buffers = buffers_;
            d.threadgroup = threadgroup_;
            d.reached = reached_;
            return d;
        }

       private:
        Dispatch dispatch_;
        std::vector<std::byte> args_;
        std::vector<Binding> buffers_;
        std::vector<uint32_t> threadgroup_;
        std::vector<Binding> reached_;
    };

    void run_waiting() {
        const std::vector<Waiting> waiting = std::exchange(waiting_, {});
        for (size_t i = waiting.size(); i-- > 0;) execute(waiting[i].dispatch());
    }

    // Bytes that a dispatch of the present stage touched.
    struct Touched {
        const std::byte *begin, *end;
        bool written;
        std::string kernel;
    };

    // Dispatches of one stage may run side by side, so none may touch what another writes.
    void check_stage(const std::string& kernel, const std::vector<metal::Binding>& bindings,
                     const metal::Result& result) {
        const size_t earlier = stage_.size();
        for (uint32_t i = 0; i < result.range_count; ++i) {
            const metal::Range& range = result.ranges[i];
            const auto binding = std::find_if(bindings.begin(), bindings.end(), [&](const metal::Binding& b) {
                return b.index == range.buffer;
            });
            const auto* data = static_cast<const std::byte*>(binding->data);
            const Touched now{data + range.begin, data + range.end, range.written != 0, kernel};
            for (size_t j = 0; j < earlier; ++j) {
                const Touched& before = stage_[j];
                if ((now.written || before.written) && now.begin < before.end && before.begin < now.end)
                    throw DeviceError(format("%s %s what %s %s, and there is no barrier between them",
                                             kernel.c_str(), now.written ? "writes" : "reads",
                                             before.kernel.c_str(), before.written ? "wrote" : "read"));
            }
            stage_.push_back(now);
        }
    }

    // What each stretch of memory saw, beside what was declared of it. The arguments, which travel with the
    // dispatch, are left out.
    void record(const Dispatch& d, const std::vector<metal::Binding>& bindings, const metal::Result& result) {
        RecordedDispatch made{.kernel = d.kernel,
                              .op = d.op,
                              .stage = stages_,
                              .groups = int64_t{d.groups[0]} * d.groups[1] * d.groups[2],
                              .threads = d.threads,
                              .memory = {}};
        std::map<uint32_t, Traffic*> of_index;
        made.memory.reserve(bindings.size());
        size_t i = 1;
        for (const auto& list : {d.buffers, d.reached})
            for (const Binding& b : list) {
                made.memory.push_back({.bytes = b.bytes, .reads = b.reads, .writes = b.writes});
                of_index[bindings[i++].index] = &made.memory.back();
            }
        for (const metal::Traffic& seen : std::span(result.traffic, result.traffic_count)) {
            const auto found = of_index.find(seen.buffer);
            if (found == of_index.end()) continue;
            Traffic& traffic = *found->second;
            traffic.asked_read = seen.bytes_read;
            traffic.asked_written = seen.bytes_written;
            traffic.accesses = seen.groups;
            traffic.sectors = seen.sectors;
            traffic.lines = seen.lines;
        }
        count_lines(bindings, result, of_index);
        recorded_->push_back(std::move(made));
    }

    // Distinct lines of 64 bytes; ranges are in order, and two may share a line.
    static void count_lines(const std::vector<metal::Binding>& bindings, const metal::Result& result,
                            const std::map<uint32_t, Traffic*>& of_index) {
        uint32_t buffer = 0, written = 0;
        uint64_t next = 0;  // the first line that is not counted yet
        for (const metal::Range& range : std::span(result.ranges, result.range_count)) {
            const auto found = of_index.find(range.buffer);
            if (found == of_index.end()) continue;
            if (range.buffer != buffer || range.written != written) next = 0;
            buffer = range.buffer;
            written = range.written;
            const auto binding = std::find_if(bindings.begin(), bindings.end(),
                                              [&](const metal::Binding& b) { return b.index == buffer; });
            const auto data = reinterpret_cast<uint64_t>(binding->data);
            const uint64_t first = std::max(next, (data + range.begin) / 64),
                           end = (data + range.end + 63) / 64;
            (written ? found->second->written_lines : found->second->read_lines) +=
                end - std::min(first, end);
            next = end;
        }
    }

    std::vector<Waiting> waiting_;
    std::vector<Touched> stage_;
    std::optional<std::vector<RecordedDispatch>> recorded_;
    int64_t barriers_ = 0, dropped_ = -1;
    int64_t stages_ = 0;  // begun so far: by a barrier, or by the host that waited
    std::unique_ptr<void, int (*)(void*)> handle_;
    const Library* library_ = nullptr;
    std::map<std::string, uint32_t> kernels_;
};

}  // namespace

std::unique_ptr<Device> make_simulator(const std::string& file) {
    return std::make_unique<Simulator>(file);
}

}  // namespace lily
