#include "findings.h"

#include <cstdarg>
#include <cstdio>

#include "scheduler.h"

namespace lily::metal {

void Findings::add(Entry entry) {
    for (Entry& other : entries) {
        if (other.fault == entry.fault && other.buffer == entry.buffer && other.line == entry.line &&
            other.code == entry.code) {
            other.count++;
            return;
        }
    }
    if (entries.size() < kMost) entries.push_back(std::move(entry));
}

void report(Worker& worker, Fault fault, uint32_t line, const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    worker.findings->add({.fault = fault, .line = line, .text = text});
}

}  // namespace lily::metal
