#include "state.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "error.h"
#include "ops.h"

namespace lily {

namespace {

// Whether no other state holds a block. Who let go of it last did so after reading it, which the fence keeps
// in order with what is written next.
bool alone(const std::shared_ptr<Block>& block) {
    if (block->mapped() || block.use_count() > 1) return false;
    std::atomic_thread_fence(std::memory_order_acquire);
    return true;
}

}  // namespace

StateLayout::StateLayout(const Config& c, DType kv_type, int recurrent_copies)
    : kv(kv_type), copies(recurrent_copies) {
    head = kPageTokens * (static_cast<size_t>(c.head_dim) * bytes_of(kv) + bytes_of_scale(kv));
    plane = static_cast<size_t>(c.kv_heads) * head;
    page = plane * 2 * static_cast<size_t>(c.attention_layers());
    conv = static_cast<int64_t>(c.conv_taps - 1) * c.channels();
    delta = static_cast<int64_t>(c.value_heads) * c.value_dim * c.key_dim;
    delta_layers = c.delta_layers();
    recurrent = static_cast<size_t>(delta_layers) * static_cast<size_t>(conv + delta) * sizeof(float);
    logits = static_cast<size_t>(c.vocab) * sizeof(float);
}

void Ledger::take(size_t bytes) {
    const auto asked = static_cast<int64_t>(bytes);
    int64_t before = live_, after = 0;
    do {
        after = before + asked;
        const int64_t limit = limit_;
        LILY_CHECK(
            MemoryLimitError, limit == 0 || after <= limit,
            "states: wanted %lld bytes more, %lld of the %lld allowed are taken; let go of prefixes, or "
            "allow more",
            static_cast<long long>(asked), static_cast<long long>(before), static_cast<long long>(limit));
    } while (!live_.compare_exchange_weak(before, after));
    int64_t peak = peak_;
    while (peak < after && !peak_.compare_exchange_weak(peak, after)) {
    }
}

Block::Block(Ops& ops, std::shared_ptr<Ledger> ledger, size_t bytes)
    : bytes_(bytes), ledger_(std::move(ledger)) {
    ledger_->take(bytes);
    try {
        memory_ = ops.allocate(bytes);
    } catch (...) {
        ledger_->give(bytes);
        throw;
    }
}

Block::Block(Memory file, size_t bytes) : filled(kPageTokens), memory_(std::move(file)), bytes_(bytes) {}

Block::~Block() {
    if (ledger_) ledger_->give(bytes_);
}

State::State(const StateLayout& layout, Ops& ops, std::shared_ptr<Ledger> ledger)
    : layout_(layout), ledger_(std::move(ledger)), now_(allocate(ops, layout.recurrent)) {}

State::State(const StateLayout& layout, std::shared_ptr<Ledger> ledger, int64_t length,
             std::span<const Share> pages, Share recurrent, Share logits)
    : layout_(layout),
      ledger_(std::move(ledger)),
      pages_(pages.begin(), pages.end()),
      now_(std::move(recurrent)),
      logits_(std::move(logits)),
      length_(length),
      has_logits_(logits_ != nullptr) {}

State State::fork() const {
    State copy = *this;
    copy.next_.reset();
    if (!has_logits_) copy.logits_.reset();
    const auto held = static_cast<size_t>((length_ + kPageTokens - 1) / kPageTokens);
    if (copy.pages_.size() > held) copy.pages_.resize(held);
    return copy;
}

State State::fork_ahead(std::shared_ptr<Block> logits) {
    State copy = fork();
    copy.next_ = std::exchange(next_, nullptr);
    copy.logits_ = std::move(logits);
    copy.has_logits_ = false;
    return copy;
}

std::vector<const Block*> State::blocks() const {
    std::vector<const Block*> found;
    for (const Share& page : pages_) found.push_back(page.get());
    for (const Share* block : {&now_, &next_, &logits_})
        if (*block) found.push_back(block->get());
    return found;
}

size_t State::bytes() const {
    const State* self = this;
    return bytes_of(std::span(&self, 1));
}

State::Share State::allocate(Ops& ops, size_t bytes) const {
    return std::make_shared<Block>(ops, ledger_, bytes);
}

void State::own(Share& block, Ops& ops) const {
    if (alone(block)) return;
    Share mine = allocate(ops, block->bytes());
    ops.copy(mine->data(), block->data(), block->bytes());
    block = std::move(mine);
}

void State::prepare(int64_t tokens, Ops& ops) {
    if (layout_.copies == 1) {
        own(now_, ops);
    } else if (!next_ || !alone(next_)) {
        next_ = allocate(ops, layout_.recurrent);
    }
    if (layout_.page == 0) return;
    const int64_t end = length_ + tokens;
    for (int64_t page = length_ / kPageTokens; page * kPageTokens < end; ++page) {
        const auto p = static_cast<size_t>(page);
        while (p >= pages_.size()) pages_.push_back(allocate(ops, layout_.page));
        // Positions from `length` on are free if nobody has taken them yet, whoever else holds the page.
        const int64_t first = std::max<int64_t>(length_ - page * kPageTokens, 0);
        if (pages_[p]->mapped() || pages_[p]->filled != first) own(pages_[p], ops);
        pages_[p]->filled = static_cast<int>(std::min<int64_t>(end - page * kPageTokens, kPageTokens));
    }
}

void State::advance(int64_t tokens) {
    length_ += tokens;
    if (next_) std::swap(now_, next_);
}

float* State::new_logits(Ops& ops) {
    if (!logits_ || !alone(logits_)) logits_ = allocate(ops, layout_.logits);
    return logits();
}

float kept_at(const std::byte* head, DType kv, int64_t Dh, int64_t i, int64_t slot) {
    if (kv != DType::i8) return float_at(head, kv, static_cast<size_t>(i));
    const std::byte* scales = head + kPageTokens * Dh;
    return load<float>(scales + slot * 4) * static_cast<float>(load<int8_t>(head + i));
}

Memory map_file(int file, size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    LILY_CHECK(DeviceError, memory != MAP_FAILED, "a file of %zu bytes cannot be mapped: %s", bytes,
               std::strerror(errno));
    return Memory(static_cast<std::byte*>(memory), [bytes](std::byte* p) { munmap(p, bytes); });
}

size_t bytes_of(std::span<const State* const> states) {
    std::vector<const Block*> blocks;
    for (const State* state : states) {
        const std::vector<const Block*> more = state->blocks();
        blocks.insert(blocks.end(), more.begin(), more.end());
    }
    std::ranges::sort(blocks);
    const auto repeated = std::ranges::unique(blocks);
    size_t bytes = 0;
    for (auto block = blocks.begin(); block != repeated.begin(); ++block) bytes += (*block)->bytes();
    return bytes;
}

}  // namespace lily
