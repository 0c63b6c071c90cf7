// The simulated queue: command buffers run one after another on a thread of their own, a stage between two
// barriers in the reverse of its order.
#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "simulated.h"

using namespace simulated;
using lily::metal::kBuffers;

namespace {

constexpr auto kPatience = std::chrono::seconds(20);  // for what must come, before it counts as missing
constexpr auto kLook = std::chrono::milliseconds(2);

struct Bound {
    BufferInfo buffer;
    size_t offset = 0;
    std::string bytes;  // of setBytes
    bool set = false;
};

struct Command {
    enum Kind { kDispatch, kBarrier, kWait, kUpdate, kSignal, kUse } kind;
    SimulatedPipeline* pipeline = nil;
    std::vector<std::pair<uint32_t, Bound>> bound = {};
    std::array<uint32_t, 8> threadgroup = {};
    std::array<uint32_t, 3> groups = {1, 1, 1}, threads = {1, 1, 1};
    Bound indirect = {};
    SimulatedEvent* event = nil;
    uint64_t value = 0;
    std::vector<BufferInfo> used = {};
    const void* fence = nullptr;
};

std::mutex flying_mutex;
std::multiset<uint64_t> flying;  // buffers of command buffers that have not completed

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

bool simulated::in_flight(uint64_t buffer) {
    const std::lock_guard lock(flying_mutex);
    return flying.contains(buffer);
}

@interface SimulatedEvent () {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t value;
}
@end
@implementation SimulatedEvent
- (uint64_t)signaledValue {
    const std::lock_guard lock(mutex);
    return value;
}
- (void)setSignaledValue:(uint64_t)wanted {
    {
        const std::lock_guard lock(mutex);
        value = wanted;
    }
    changed.notify_all();
}
- (BOOL)waitUntilSignaledValue:(uint64_t)wanted timeoutMS:(uint64_t)milliseconds {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] { return value >= wanted; });
}
@end

@class SimulatedCommandBuffer;

// What a queue shares with its command buffers and with the thread that runs them.
struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<SimulatedCommandBuffer*> waiting;
    std::vector<SimulatedResidencySet*> sets;
    bool ends = false;
    uint64_t committed = 0;
    const void* fence = nullptr;  // that the last encoder updated
    bool encoded = false;         // whether there was one
};

@interface SimulatedQueue () {
    std::shared_ptr<Queue> queue;
    std::thread worker;
}
@end

@interface SimulatedCommandBuffer : NSObject <MTLCommandBuffer> {
   @public
    std::shared_ptr<Queue> queue;
    std::vector<Command> commands;
    std::vector<MTLCommandBufferHandler> handlers;
    MTLCommandBufferStatus state;
    NSError* fault;
    double begin, end;
    uint64_t number;
    bool encoding;
}
@end

@implementation MTLCommandBufferDescriptor
- (instancetype)init {
    self.retainedReferences = YES;
    return self;
}
@end

@interface SimulatedEncoder : NSObject <MTLComputeCommandEncoder> {
   @public
    SimulatedCommandBuffer* buffer;
    Command next;
    std::array<Bound, kBuffers> bound;
    bool ended, waited, dispatched;
}
@end

@implementation SimulatedEncoder
@synthesize label;
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
    if (!state) problem("setComputePipelineState:nil");
    next.pipeline = (SimulatedPipeline*)state;
}
- (void)setBuffer:(id<MTLBuffer>)given offset:(NSUInteger)offset atIndex:(NSUInteger)index {
    if (index >= kBuffers) return problem("setBuffer: index " + std::to_string(index));
    if (!given) {
        bound[index] = {};
        return;
    }
    const BufferInfo& info = ((SimulatedBuffer*)given)->info;
    if (offset >= info.bytes) return problem("setBuffer: an offset past the end of the buffer");
    bound[index] = {info, offset, "", true};
}
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
    if (length > 4096 || length == 0) return problem("setBytes: takes 1 to 4096 bytes");
    bound[index] = {{}, 0, std::string(static_cast<const char*>(bytes), length), true};
}
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
    if (length % 16) problem("threadgroup memory: wanted a multiple of 16 bytes");
    next.threadgroup.at(index) = static_cast<uint32_t>(length);
}
- (void)useResource:(id<MTLResource>)resource usage:(MTLResourceUsage)usage {
    buffer->commands.push_back({.kind = Command::kUse, .used = buffers_of(resource)});
}
- (void)dispatch:(MTLSize)groups threads:(MTLSize)threads {
    if (ended) return problem("a dispatch after endEncoding");
    if (!next.pipeline) return problem("a dispatch without a pipeline");
    const NSUInteger count = threads.width * threads.height * threads.depth;
    if (count == 0 || count > next.pipeline.maxTotalThreadsPerThreadgroup)
        return problem("a dispatch of " + std::to_string(count) + " threads a threadgroup");
    if (groups.width * groups.height * groups.depth == 0) return problem("a dispatch of no threadgroups");
    Command command = next;
    command.kind = Command::kDispatch;
    command.groups = {uint32_t(groups.width), uint32_t(groups.height), uint32_t(groups.depth)};
    command.threads = {uint32_t(threads.width), uint32_t(threads.height), uint32_t(threads.depth)};
    for (uint32_t i = 0; i < kBuffers; ++i)
        if (bound[i].set) command.bound.push_back({i, bound[i]});
    buffer->commands.push_back(std::move(command));
    next.indirect = {};
}
- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)threads {
    [self dispatch:groups threads:threads];
}
- (void)dispatchThreadgroupsWithIndirectBuffer:(id<MTLBuffer>)given
                          indirectBufferOffset:(NSUInteger)offset
                         threadsPerThreadgroup:(MTLSize)threads {
    if (offset % 4) problem("an indirect buffer's offset is no multiple of 4");
    next.indirect = {((SimulatedBuffer*)given)->info, offset, "", true};
    [self dispatch:MTLSizeMake(1, 1, 1) threads:threads];
}
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
    buffer->commands.push_back({.kind = Command::kBarrier});
}
- (void)waitForFence:(id<MTLFence>)fence {
    buffer->commands.push_back({.kind = Command::kWait, .fence = (__bridge const void*)fence});
}
- (void)updateFence:(id<MTLFence>)fence {
    buffer->commands.push_back({.kind = Command::kUpdate, .fence = (__bridge const void*)fence});
}
- (void)endEncoding {
    if (ended) problem("endEncoding twice");
    ended = true;
    buffer->encoding = false;
}
- (void)dealloc {
    if (!ended) problem("an encoder was released before endEncoding");
}
@end

namespace {

// Runs the commands of one command buffer.
class Execution {
   public:
    explicit Execution(Queue* queue) : queue_(queue) {
        const std::lock_guard lock(queue->mutex);
        for (SimulatedResidencySet* set : queue->sets)
            for (id<MTLAllocation> allocation : set->held) use(buffers_of(allocation));
    }

    void run(const std::vector<Command>& commands) {
        bool waited = false;
        for (const Command& command : commands) switch (command.kind) {
                case Command::kDispatch:
                    stage_.push_back(&command);
                    break;
                case Command::kBarrier:
                    flush();
                    break;
                case Command::kUse:
                    use(command.used);
                    break;
                case Command::kSignal:
                    flush();
                    note("signal " + std::to_string(command.value));
                    [command.event setSignaledValue:command.value];
                    break;
                case Command::kWait:
                    waited = queue_->fence == command.fence;
                    break;
                case Command::kUpdate:
                    flush();
                    if (queue_->encoded && !waited)
                        problem("an encoder does not wait for the fence of the one before it");
                    queue_->encoded = true;
                    queue_->fence = command.fence;
                    break;
            }
        flush();
    }

   private:
    struct Touched {
        uint64_t begin, end;
        bool written;
        const char* kernel;
    };

    void use(const std::vector<BufferInfo>& buffers) {
        resident_.insert(resident_.end(), buffers.begin(), buffers.end());
    }

    void flush() {
        if (!setting("skip_kernels"))
            for (auto command = stage_.rbegin(); command != stage_.rend(); ++command) execute(**command);
        stage_.clear();
        touched_.clear();
    }

    void execute(const Command& command) {
        const lily::metal::Library& library = *command.pipeline->library;
        const lily::metal::Kernel& kernel = library.kernels[command.pipeline->kernel];
        note(std::string("run ") + kernel.name);
        std::vector<lily::metal::Binding> bindings;
        for (const auto& [index, bound] : command.bound) {
            const bool wanted =
                std::any_of(kernel.arguments, kernel.arguments + kernel.argument_count,
                            [&, i = index](const lily::metal::Argument& a) {
                                return a.index == i && a.space != lily::metal::Space::kThreadgroup;
                            });
            if (!wanted) continue;  // left from an earlier dispatch of the encoder
            const bool bytes = !bound.buffer.gpu;
            bindings.push_back({.index = index,
                                .writes = !bytes,
                                .data = bytes ? const_cast<char*>(bound.bytes.data())
                                              : static_cast<void*>(bound.buffer.gpu + bound.offset),
                                .bytes = bytes ? bound.bytes.size() : bound.buffer.bytes - bound.offset});
        }
        uint32_t index = kBuffers;
        if (library.instrumented)  // what a kernel reaches by address has to be resident
            for (const BufferInfo& buffer : resident_)
                bindings.push_back(
                    {.index = index++, .writes = 1, .data = buffer.gpu, .bytes = buffer.bytes});
        lily::metal::Launch launch;
        launch.kernel = command.pipeline->kernel;
        std::copy_n(command.groups.begin(), 3, launch.groups);
        std::copy_n(command.threads.begin(), 3, launch.threads);
        if (command.indirect.set)
            launch.indirect =
                reinterpret_cast<const uint32_t*>(command.indirect.buffer.gpu + command.indirect.offset);
        launch.bindings = bindings.data();
        launch.binding_count = static_cast<uint32_t>(bindings.size());
        launch.threadgroup_bytes = command.threadgroup.data();
        launch.threadgroup_count = static_cast<uint32_t>(
            std::count_if(kernel.arguments, kernel.arguments + kernel.argument_count,
                          [](const auto& a) { return a.space == lily::metal::Space::kThreadgroup; }));
        lily::metal::Result* result = library.dispatch(&launch);
        for (uint32_t i = 0; i < result->finding_count; ++i)
            problem(std::string(kernel.name) + ": " + result->findings[i].message);
        if (library.instrumented) check_stage(kernel.name, bindings, *result);
        library.release(result);
    }

    // No dispatch of a stage may touch what another one writes.
    void check_stage(const char* kernel, const std::vector<lily::metal::Binding>& bindings,
                     const lily::metal::Result& result) {
        const size_t earlier = touched_.size();
        for (uint32_t i = 0; i < result.range_count; ++i) {
            const lily::metal::Range& range = result.ranges[i];
            const auto binding = std::find_if(bindings.begin(), bindings.end(),
                                              [&](const auto& b) { return b.index == range.buffer; });
            const auto data = reinterpret_cast<uint64_t>(binding->data);
            const Touched now{data + range.begin, data + range.end, range.written != 0, kernel};
            for (size_t j = 0; j < earlier; ++j) {
                const Touched& before = touched_[j];
                if ((now.written || before.written) && now.begin < before.end && before.begin < now.end)
                    problem(std::string(kernel) + " and " + before.kernel +
                            " touch the same memory without a barrier between them");
            }
            touched_.push_back(now);
        }
    }

    Queue* queue_;
    std::vector<BufferInfo> resident_;
    std::vector<const Command*> stage_;
    std::vector<Touched> touched_;
};

}  // namespace

@implementation SimulatedCommandBuffer
@synthesize label;
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
    if (encoding) problem("a second encoder while one is open");
    encoding = true;
    SimulatedEncoder* made = [SimulatedEncoder new];
    made->buffer = self;
    return made;
}
- (void)encodeSignalEvent:(id<MTLSharedEvent>)event value:(uint64_t)value {
    if (encoding) problem("encodeSignalEvent while an encoder is open");
    commands.push_back({.kind = Command::kSignal, .event = (SimulatedEvent*)event, .value = value});
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)handler {
    if (state != MTLCommandBufferStatusNotEnqueued) problem("addCompletedHandler after commit");
    handlers.push_back(handler);
}
- (std::multiset<uint64_t>)uses {
    std::multiset<uint64_t> ids;
    for (const Command& command : commands) {
        for (const auto& [index, bound] : command.bound)
            if (bound.buffer.gpu) ids.insert(bound.buffer.id);
        if (command.indirect.set) ids.insert(command.indirect.buffer.id);
        for (const BufferInfo& used : command.used) ids.insert(used.id);
    }
    return ids;
}
- (void)commit {
    if (encoding) problem("commit while an encoder is open");
    if (state != MTLCommandBufferStatusNotEnqueued) return problem("commit twice");
    {
        const std::lock_guard lock(flying_mutex);
        const std::multiset<uint64_t> mine = [self uses];
        flying.insert(mine.begin(), mine.end());
    }
    {
        const std::lock_guard lock(queue->mutex);
        number = ++queue->committed;
        state = MTLCommandBufferStatusCommitted;
        queue->waiting.push_back(self);
        note("commit " + std::to_string(number));
    }
    queue->changed.notify_all();
}
- (void)fail:(NSInteger)code {
    fault = [NSError simulated:@"MTLCommandBufferErrorDomain" code:code text:"simulated failure"];
}
- (void)run {
    begin = now();
    if (setting("lost"))
        [self fail:MTLCommandBufferErrorDeviceRemoved];
    else if (count_down("fail_buffer"))
        [self fail:setting("fail_code")];
    else
        Execution(queue.get()).run(commands);
    end = now();
    {
        const std::lock_guard lock(flying_mutex);
        for (uint64_t id : [self uses]) flying.erase(flying.find(id));
    }
    {
        const std::lock_guard lock(queue->mutex);
        state = fault ? MTLCommandBufferStatusError : MTLCommandBufferStatusCompleted;
    }
    note("complete " + std::to_string(number));
    for (MTLCommandBufferHandler handler : handlers) handler(self);
    handlers.clear();
    commands.clear();
}
- (MTLCommandBufferStatus)status {
    const std::lock_guard lock(queue->mutex);
    return state;
}
- (NSError*)error {
    return fault;
}
- (CFTimeInterval)GPUStartTime {
    return begin;
}
- (CFTimeInterval)GPUEndTime {
    return end;
}
@end

static void work(const std::shared_ptr<Queue>& queue) {
    for (;;) {
        @autoreleasepool {
            SimulatedCommandBuffer* buffer = nil;
            {
                std::unique_lock lock(queue->mutex);
                queue->changed.wait(lock, [&] { return queue->ends || !queue->waiting.empty(); });
                if (queue->waiting.empty()) return;
                buffer = queue->waiting.front();
                queue->waiting.pop_front();
                const auto has_followers = [&] {
                    const auto ahead = static_cast<uint64_t>(setting("ahead"));
                    return queue->ends || ahead == 0 || queue->committed >= buffer->number + ahead;
                };
                const auto end = std::chrono::steady_clock::now() + kPatience;
                while (!has_followers() && std::chrono::steady_clock::now() < end)
                    queue->changed.wait_for(lock, kLook);  // the setting changes without a word
                if (!has_followers())
                    problem("command buffer " + std::to_string(buffer->number) +
                            " waited for a later one in vain");
            }
            [buffer run];
        }
    }
}

@implementation SimulatedQueue
@synthesize label;
- (instancetype)init {
    queue = std::make_shared<Queue>();
    worker = std::thread(work, queue);
    return self;
}
- (id<MTLCommandBuffer>)commandBufferWithDescriptor:(MTLCommandBufferDescriptor*)descriptor {
    if (descriptor.retainedReferences) problem("a command buffer that retains, which is not simulated");
    SimulatedCommandBuffer* made = [SimulatedCommandBuffer new];
    made->queue = queue;
    return made;
}
- (void)addResidencySet:(id<MTLResidencySet>)set {
    const std::lock_guard lock(queue->mutex);
    queue->sets.push_back((SimulatedResidencySet*)set);
}
- (void)removeResidencySet:(id<MTLResidencySet>)set {
    const std::lock_guard lock(queue->mutex);
    std::erase(queue->sets, (SimulatedResidencySet*)set);
}
- (void)dealloc {
    {
        const std::lock_guard lock(queue->mutex);
        queue->ends = true;
    }
    queue->changed.notify_all();
    worker.join();
}
@end
