// What the core says to people. An exception's message says what, wanted, got, and what to do about it.
#pragma once

#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>

namespace lily {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The checkpoint on disk is incomplete, damaged, or not one that Lily reads.
struct ModelFilesError : Error {
    using Error::Error;
};

// A prompt or a generation does not fit the context.
struct ContextError : Error {
    using Error::Error;
};

// States would take more memory than they may.
struct MemoryLimitError : Error {
    using Error::Error;
};

// The device refused or failed.
struct DeviceError : Error {
    using Error::Error;
};

// Takes a sentence for somebody who waits: what takes long, before it is done.
using Notice = std::function<void(const std::string&)>;

template <class... Arguments>
std::string format(const char* pattern, Arguments... arguments) {
    const int length = std::snprintf(nullptr, 0, pattern, arguments...);
    std::string text(static_cast<size_t>(length > 0 ? length : 0), '\0');
    std::snprintf(text.data(), text.size() + 1, pattern, arguments...);
    return text;
}

inline std::string format(const char* text) {
    return text;
}

}  // namespace lily

// Throws TYPE with a printf-style message unless CONDITION holds.
#define LILY_CHECK(TYPE, CONDITION, ...)                           \
    do {                                                           \
        if (!(CONDITION)) throw TYPE(::lily::format(__VA_ARGS__)); \
    } while (false)
