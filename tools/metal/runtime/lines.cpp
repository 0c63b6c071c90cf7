// From a place in the library's code to the line of Metal it comes from: read from the file that compile.py
// lays beside an instrumented library, one `address line file` for every watched access.
#include <dlfcn.h>

#include <fstream>
#include <string>
#include <unordered_map>

#include "instruments.h"

extern "C" const char __ehdr_start[] __attribute__((visibility("hidden")));

namespace lily::metal {
namespace {

std::unordered_map<uint64_t, SourceLine> read_lines() {
    std::unordered_map<uint64_t, SourceLine> lines;
    Dl_info info;
    if (!dladdr(__ehdr_start, &info) || !info.dli_fname) return lines;
    std::ifstream file(std::string(info.dli_fname) + ".lines");
    uint64_t address;
    SourceLine line;
    while (file >> std::hex >> address >> std::dec >> line.line && std::getline(file >> std::ws, line.file))
        lines[address] = line;
    return lines;
}

}  // namespace

SourceLine source_line(const void* code) {
    static const auto& lines = *new std::unordered_map<uint64_t, SourceLine>(read_lines());
    const auto found = lines.find(static_cast<uint64_t>(static_cast<const char*>(code) - __ehdr_start));
    return found == lines.end() ? SourceLine{} : found->second;
}

}  // namespace lily::metal
