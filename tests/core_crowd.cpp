// The core from many threads, without Python: prompts, answers and forks of what others took in, at once,
// some of them called off halfway. Whatever is finished must be what it is alone. Built with the thread
// sanitizer by `make sanitize-threads`.
//   core_crowd CHECKPOINT SECONDS
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "options.h"
#include "session.h"

namespace {

constexpr int kThreads = 8, kStories = 12, kTokens = 10, kChunk = 32;

struct CalledOff {};

using Clock = std::chrono::steady_clock;
using Tokens = std::vector<int32_t>;

Tokens prompt_of(int story) {
    Tokens tokens;
    for (int i = 0; i < 20 + 8 * story; ++i) tokens.push_back(1 + (i * 7 + (i > 30 ? story : 0)) % 150);
    return tokens;
}

struct Crowd {
    lily::Session& session;
    std::vector<Tokens> want;
    std::mutex mutex;
    std::vector<lily::State> shared;  // a state after each prompt's first half
    std::atomic<int64_t> finished{0}, called_off{0}, wrong{0};

    // What follows a prompt. It may begin with a fork of what somebody else has taken in. `patience` is how
    // many layers, and tokens, it waits for before it calls itself off.
    Tokens write(int story, bool from_shared, int patience) {
        const Tokens prompt = prompt_of(story);
        lily::State state = session.new_state();
        if (from_shared) {
            const std::lock_guard lock(mutex);
            state = shared[static_cast<size_t>(story)].fork();
        }
        const auto tire = [&] {
            if (--patience == 0) throw CalledOff();
        };
        session.extend(state, std::span(prompt).subspan(static_cast<size_t>(state.length())), nullptr, tire);
        lily::History history;
        const lily::Sampling sampling{.temperature = 1.f, .seed = static_cast<uint64_t>(story)};
        Tokens written{session.sample(state, sampling)};
        for (int i = 0; i < kTokens; ++i) {
            tire();
            written.push_back(session.step(state, written.back(), sampling, history));
        }
        return written;
    }

    void take_half(int story) {
        const Tokens prompt = prompt_of(story);
        lily::State state = session.new_state();
        session.extend(state, std::span(prompt).first(prompt.size() / 2), nullptr);
        const std::lock_guard lock(mutex);  // whoever is at work with the old one goes on with it
        shared[static_cast<size_t>(story)] = state;
    }

    void work(unsigned seed, Clock::time_point end) {
        std::mt19937 random(seed);
        while (Clock::now() < end) {
            const int story = static_cast<int>(random() % kStories);
            if (random() % 8 == 0) take_half(story);
            try {
                const int patience = random() % 2 ? 0 : 1 + static_cast<int>(random() % 60);
                const Tokens written = write(story, random() % 2, patience);
                wrong += written != want[static_cast<size_t>(story)];
                ++finished;
            } catch (const CalledOff&) {
                ++called_off;
            }
        }
    }
};

int run(const char* checkpoint, int seconds) {
    const auto weights = lily::load_weights(checkpoint);
    lily::Options options = lily::options_from_environment();
    options.threads = 2;
    const auto kv = lily::DType::bf16;
    lily::Session session(weights, lily::make_ops(*weights, options, kChunk, kv), kChunk, kv,
                          options.decode_batch);
    Crowd crowd{.session = session};
    crowd.shared.resize(kStories);
    for (int story = 0; story < kStories; ++story) {
        crowd.take_half(story);
        crowd.want.push_back(crowd.write(story, false, 0));
    }
    const auto end = Clock::now() + std::chrono::seconds(seconds);
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < kThreads; ++i) threads.emplace_back([&, i] { crowd.work(i, end); });
    for (std::thread& thread : threads) thread.join();
    const auto [steps, batches] = session.turns().counts();
    std::printf("%lld finished, %lld called off, %lld wrong; %lld steps in %lld passes\n",
                static_cast<long long>(crowd.finished), static_cast<long long>(crowd.called_off),
                static_cast<long long>(crowd.wrong), static_cast<long long>(steps),
                static_cast<long long>(batches));
    return crowd.wrong != 0 || crowd.finished == 0 || crowd.called_off == 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: core_crowd CHECKPOINT SECONDS\n");
        return 2;
    }
    try {
        return run(argv[1], std::atoi(argv[2]));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
