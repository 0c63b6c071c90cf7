// The only file that reads the environment.
#include "options.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <stdexcept>

namespace lily {

namespace {

std::string text_of(int value) {
    return std::to_string(value);
}
std::string text_of(const std::string& value) {
    return value;
}
std::string text_of(bool value) {
    return value ? "true" : "false";
}
const char* type_of(bool) {
    return "bool";
}
const char* type_of(int) {
    return "int";
}
const char* type_of(const std::string&) {
    return "str";
}

void parse(const std::string& name, const std::string& text, int& value) {
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || rest != end || text.empty())
        throw std::invalid_argument("option " + name + ": wanted an integer, got '" + text + "'");
}
void parse(const std::string& name, const std::string& text, bool& value) {
    std::string lower;
    for (char c : text) lower += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    if (lower != "true" && lower != "false" && lower != "1" && lower != "0")
        throw std::invalid_argument("option " + name + ": wanted true or false, got '" + text + "'");
    value = lower == "true" || lower == "1";
}
void parse(const std::string&, const std::string& text, std::string& value) {
    value = text;
}

// Edits that turn one name into the other: for suggesting what was meant.
size_t distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t changed = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min({changed, row[j] + 1, row[j - 1] + 1});
        }
    }
    return row[b.size()];
}

[[noreturn]] void unknown(const std::string& name) {
    std::string nearest, all;
    size_t best = std::max<size_t>(1, name.size() / 3) + 1;  // a longer name has room for more slips
    for (const OptionInfo& option : option_list()) {
        all += (all.empty() ? "" : ", ") + option.name;
        const size_t edits = distance(name, option.name);
        if (edits < best) {
            best = edits;
            nearest = option.name;
        }
    }
    throw std::invalid_argument(
        "no option '" + name + "'" +
        (nearest.empty() ? "; the options are " + all : ", did you mean '" + nearest + "'?"));
}

std::vector<std::string> words_of(const std::string& text) {
    std::istringstream stream(text);
    return {std::istream_iterator<std::string>(stream), {}};
}

// Against what a technique is measured. A switch's is its opposite, whichever switch it is; of numbers and
// names it has to be said.
std::vector<std::string> alternatives(const std::string&, bool standard) {
    return {text_of(!standard)};
}
template <class Value>
std::vector<std::string> alternatives(const std::string& name, const Value&) {
    static const std::map<std::string, std::string> kSaid = {
        {"device", ""},
        {"threads", ""},
        {"simd", ""},
        {"kernels", ""},
        {"resident_seconds", ""},
        {"repack", ""},        // changes how long loading takes as well
        {"repack_cache", ""},  // changes how long loading takes
        {"kv", ""},            // changes what is kept, and is judged by agreement first
        {"decode_batch", ""},
        {"checkpoint_tokens", ""},
        {"speculate", ""},  // depends on the text: bench/speculate.py
        {"prefill_digits", "2"},
        {"prefill_chunk", "512 1024 4096 8192"},
        {"fixed_blocks_from", "0 1"},
        {"flash_from", "0"},
        {"gdn_scan", "registers packed chunked"},
        {"gdn_scan_from", "0"},
        {"matmul_rows", "65537"},  // past the largest chunk: never
        {"expert_tile", "16 32"},
        {"tiles", "simdgroup"},
    };
    const auto said = kSaid.find(name);
    if (said == kSaid.end())
        throw std::logic_error("option " + name + ": options.cpp does not say what it is measured against");
    return words_of(said->second);
}

void one_of(const char* name, const std::string& value, const char* allowed) {
    if (std::ranges::count(words_of(allowed), value)) return;
    throw std::invalid_argument(std::string("option ") + name + ": wanted one of " + allowed + ", got '" +
                                value + "'");
}

void in_range(const char* name, int value, int low, int high) {
    if (value < low || value > high)
        throw std::invalid_argument(std::string("option ") + name + ": wanted " + std::to_string(low) +
                                    " to " + std::to_string(high) + ", got " + std::to_string(value));
}

}  // namespace

void Options::set(const std::string& key, const std::string& value) {
#define LILY_OPTION(type, name, standard, text) \
    if (key == #name) return parse(key, value, name);
    LILY_OPTIONS(LILY_OPTION)
#undef LILY_OPTION
    unknown(key);
}

std::map<std::string, std::string> Options::values() const {
    std::map<std::string, std::string> all;
#define LILY_OPTION(type, name, standard, text) all[#name] = text_of(name);
    LILY_OPTIONS(LILY_OPTION)
#undef LILY_OPTION
    return all;
}

void Options::check() const {
    one_of("device", device, "auto cpu metal cuda sim");
    one_of("kv", kv, "bf16 f32 int8");
    one_of("simd", simd, "auto amx avx512vnni avx512 avx2 neoni8mm neondot neon plain");
    one_of("repack", repack, "auto on off");
    one_of("tiles", tiles, "auto tensor simdgroup");
    one_of("gdn_scan", gdn_scan, "auto registers packed chunked");
    in_range("fixed_blocks_from", fixed_blocks_from, 0, 1 << 30);
    in_range("checkpoint_tokens", checkpoint_tokens, 0, 1 << 30);
    in_range("flash_from", flash_from, 0, 1 << 30);
    in_range("gdn_scan_from", gdn_scan_from, 0, 1 << 30);
    in_range("threads", threads, 0, 1024);
    in_range("prefill_chunk", prefill_chunk, 0, 65536);
    in_range("prefill_digits", prefill_digits, 2, 3);
    in_range("decode_batch", decode_batch, 1, 32);
    in_range("speculate", speculate, 0, 7);
    in_range("resident_seconds", resident_seconds, 0, 1 << 30);
    in_range("matmul_rows", matmul_rows, 2, 65537);
    one_of("expert_tile", text_of(expert_tile), "0 16 32");
}

Options options_from_environment() {
    Options options;
    for (const OptionInfo& option : option_list()) {
        std::string variable = "LILY_";
        for (char c : option.name) variable += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
        const char* value = std::getenv(variable.c_str());
        if (!value) continue;
        try {
            options.set(option.name, value);
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(variable + " in the environment: " + error.what());
        }
    }
    return options;
}

std::vector<OptionInfo> option_list() {
    const Options defaults;
    std::vector<OptionInfo> list;
#define LILY_OPTION(type, name, standard, text) \
    list.push_back({#name, type_of(defaults.name), text_of(defaults.name), text});
    LILY_OPTIONS(LILY_OPTION)
#undef LILY_OPTION
    return list;
}

std::map<std::string, std::vector<std::string>> option_alternatives() {
    const Options defaults;
    std::map<std::string, std::vector<std::string>> all;
#define LILY_OPTION(type, name, standard, text) all[#name] = alternatives(#name, defaults.name);
    LILY_OPTIONS(LILY_OPTION)
#undef LILY_OPTION
    return all;
}

}  // namespace lily
