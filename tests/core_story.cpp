// The core without Python: takes tokens in, continues with the best one each time, prints the ids it drew.
// tests/test_rungs.py builds it with other compilers, for another machine, and to look for leaks.
//   core_story CHECKPOINT COUNT TOKEN...
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "options.h"
#include "session.h"

namespace {

constexpr int kChunk = 16;

void tell(const char* checkpoint, int count, const std::vector<int32_t>& prompt) {
    const auto weights = lily::load_weights(checkpoint);
    lily::Options options;
    options.threads = 2;
    options.simd = "plain";
    const auto kv = lily::DType::f32;
    lily::Session session(weights, lily::make_ops(*weights, options, kChunk, kv), kChunk, kv);
    lily::State state = session.new_state();
    lily::History history;
    session.extend(state, prompt, {});
    int32_t token = session.sample(state, {});
    for (int i = 0; i < count; ++i) {
        std::printf("%d\n", token);
        if (i + 1 < count) token = session.step(state, token, {}, history);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) {
        std::fprintf(stderr, "usage: core_story CHECKPOINT COUNT TOKEN...\n");
        return 2;
    }
    std::vector<int32_t> prompt;
    for (int i = 3; i < argc; ++i) prompt.push_back(std::atoi(argv[i]));
    try {
        tell(argv[1], std::atoi(argv[2]), prompt);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
