// The JSON reader: recursive descent over one string, as RFC 8259 has it.
#include "json.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <locale>
#include <sstream>
#include <utility>

namespace lily {

namespace {

constexpr int kMaxDepth = 64;           // a config nests 4 deep
constexpr int kMaxValues = 1 << 21;     // the 35B model's index holds about 2,000
constexpr size_t kMaxShownBytes = 120;  // of a name shown in an error message

// Bytes of the UTF-8 character that text starts with; 0 when it is none (overlong, surrogate, cut short).
size_t utf8_length(std::string_view text) {
    const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
    const auto follows = [&](size_t i) { return (byte(i) & 0xC0u) == 0x80u; };
    const unsigned first = byte(0), second = byte(1);
    if (first < 0x80) return 1;
    if (first >= 0xC2 && first <= 0xDF) return follows(1) ? 2 : 0;
    if ((first & 0xF0u) == 0xE0u) {
        const bool overlong = first == 0xE0 && second < 0xA0, surrogate = first == 0xED && second > 0x9F;
        return follows(1) && follows(2) && !overlong && !surrogate ? 3 : 0;
    }
    if (first >= 0xF0 && first <= 0xF4) {
        const bool overlong = first == 0xF0 && second < 0x90, too_large = first == 0xF4 && second > 0x8F;
        return follows(1) && follows(2) && follows(3) && !overlong && !too_large ? 4 : 0;
    }
    return 0;
}

void append_utf8(std::string& out, uint32_t code) {
    const auto add = [&](uint32_t byte) { out += static_cast<char>(byte); };
    if (code < 0x80) {
        add(code);
    } else if (code < 0x800) {
        add(0xC0 | code >> 6), add(0x80 | (code & 63));
    } else if (code < 0x10000) {
        add(0xE0 | code >> 12), add(0x80 | (code >> 6 & 63)), add(0x80 | (code & 63));
    } else {
        add(0xF0 | code >> 18), add(0x80 | (code >> 12 & 63)), add(0x80 | (code >> 6 & 63)),
            add(0x80 | (code & 63));
    }
}

}  // namespace

class JsonParser {
   public:
    explicit JsonParser(std::string_view text) : text_(text) {}

    Json document() {
        Json json = value(0);
        space();
        if (at_ != text_.size()) fail("text after the end of the document");
        return json;
    }

   private:
    [[noreturn]] void fail(const std::string& what) const {
        size_t line = 1, start = 0;
        for (size_t i = 0; i < at_ && i < text_.size(); ++i) {
            if (text_[i] == '\n') ++line, start = i + 1;
        }
        throw JsonError("line " + std::to_string(line) + ", column " + std::to_string(at_ - start + 1) +
                        ": " + what);
    }

    bool done() const { return at_ >= text_.size(); }
    char peek() const { return done() ? '\0' : text_[at_]; }
    bool digit() const { return peek() >= '0' && peek() <= '9'; }

    void space() {
        while (!done() && (peek() == ' ' || peek() == '\n' || peek() == '\t' || peek() == '\r')) ++at_;
    }

    bool take(char c) {
        if (done() || text_[at_] != c) return false;
        ++at_;
        return true;
    }

    void expect(char c, const char* where) {
        space();
        if (!take(c))
            fail(std::string("wanted '") + c + "' " + where + (done() ? ", got the end of the text" : ""));
    }

    Json value(int depth) {
        space();
        if (done()) fail("wanted a value, got the end of the text");
        if (depth > kMaxDepth) fail("nested deeper than " + std::to_string(kMaxDepth));
        if (++values_ > kMaxValues) fail("more than " + std::to_string(kMaxValues) + " values");
        Json json;
        switch (peek()) {
            case '{':
                json.value_ = object(depth);
                break;
            case '[':
                json.value_ = array(depth);
                break;
            case '"':
                json.value_ = string();
                break;
            case 't':
                word("true"), json.value_ = true;
                break;
            case 'f':
                word("false"), json.value_ = false;
                break;
            case 'n':
                word("null");
                break;
            default:
                number(json);
        }
        return json;
    }

    void word(std::string_view expected) {
        if (text_.substr(at_, expected.size()) != expected) fail("wanted a value");
        at_ += expected.size();
    }

    Json::Object object(int depth) {
        Json::Object members;
        ++at_;
        space();
        if (take('}')) return members;
        do {
            space();
            if (peek() != '"') fail("wanted a key in quotes");
            const size_t start = at_;
            std::string key = string();
            if (members.contains(key)) {
                at_ = start;
                fail("the key " + in_quotes(key) + " appears twice");
            }
            expect(':', "after a key");
            members.emplace(std::move(key), value(depth + 1));
            space();
        } while (take(','));
        expect('}', "or ',' after a member");
        return members;
    }

    Json::Array array(int depth) {
        Json::Array items;
        ++at_;
        space();
        if (take(']')) return items;
        do {
            items.push_back(value(depth + 1));
            space();
        } while (take(','));
        expect(']', "or ',' after an item");
        return items;
    }

    uint32_t hex4() {
        uint32_t code = 0;
        const std::string_view digits = text_.substr(std::min(at_, text_.size()), 4);
        const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
        if (error != std::errc() || digits.size() != 4 || end != digits.data() + 4)
            fail("wanted four hex digits after \\u");
        at_ += 4;
        return code;
    }

    void escape(std::string& out) {
        static constexpr std::string_view kLetters = "\"\\/bfnrt", kMeaning = "\"\\/\b\f\n\r\t";
        const size_t which = done() ? std::string_view::npos : kLetters.find(peek());
        if (which != std::string_view::npos) {
            out += kMeaning[which];
            ++at_;
        } else if (take('u')) {
            uint32_t code = hex4();
            if (code >= 0xD800 && code < 0xDC00) {
                if (!take('\\') || !take('u')) fail("half of a surrogate pair");
                const uint32_t low = hex4();
                if (low < 0xDC00 || low > 0xDFFF) fail("half of a surrogate pair");
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            } else if (code >= 0xDC00 && code < 0xE000) {
                fail("half of a surrogate pair");
            }
            append_utf8(out, code);
        } else {
            fail("unknown escape in a string");
        }
    }

    std::string string() {
        std::string out;
        ++at_;
        while (!take('"')) {
            if (done()) fail("a string without its closing quote");
            if (static_cast<unsigned char>(peek()) < 0x20) fail("a control character in a string");
            if (take('\\')) {
                escape(out);
                continue;
            }
            const size_t length = utf8_length(text_.substr(at_));
            if (length == 0) fail("bytes that are not UTF-8");
            out.append(text_.substr(at_, length));
            at_ += length;
        }
        return out;
    }

    void digits() {
        if (!digit()) fail("wanted a digit");
        while (digit()) ++at_;
    }

    void number(Json& json) {
        const size_t start = at_;
        bool whole = true;
        take('-');
        if (!digit()) fail("wanted a value");
        if (!take('0')) digits();
        if (take('.')) whole = false, digits();
        if (take('e') || take('E')) {
            whole = false;
            if (!take('+')) take('-');
            digits();
        }
        const std::string_view written = text_.substr(start, at_ - start);
        if (whole) {
            int64_t exact = 0;
            const auto error = std::from_chars(written.data(), written.data() + written.size(), exact).ec;
            if (error != std::errc()) at_ = start, fail("a number out of range");
            json.value_ = exact;
        } else {
            double value = 0;
            std::istringstream in{
                std::string(written)};  // strtod would read with the process's own decimal point
            in.imbue(std::locale::classic());
            if (!(in >> value) || !std::isfinite(value)) at_ = start, fail("a number out of range");
            json.value_ = value;
        }
    }

    std::string_view text_;
    size_t at_ = 0;
    int values_ = 0;
};

Json Json::parse(std::string_view text) {
    return JsonParser(text).document();
}

const Json* Json::find(std::string_view key) const {
    const Object* members = std::get_if<Object>(&value_);
    if (!members) return nullptr;
    const auto found = members->find(key);
    return found == members->end() || found->second.is_null() ? nullptr : &found->second;
}

std::string Json::describe() const {
    if (is_null()) return "null";
    if (is_boolean()) return boolean() ? "true" : "false";
    if (is_integer()) return std::to_string(integer());
    if (is_string()) return in_quotes(string());
    if (is_object()) return "an object";
    if (std::holds_alternative<Array>(value_)) return "an array";
    std::ostringstream out;
    out.imbue(std::locale::classic());
    out << std::get<double>(value_);
    return out.str();
}

std::string printable(std::string_view text) {
    std::string out;
    size_t at = 0;
    while (at < text.size() && out.size() < kMaxShownBytes) {
        const size_t length = utf8_length(text.substr(at));
        const auto byte = static_cast<unsigned char>(text[at]);
        if (length == 0 || byte < 0x20 || byte == 0x7F) {
            char escaped[8];
            std::snprintf(escaped, sizeof escaped, "\\x%02x", byte);
            out += escaped;
        } else {
            out.append(text.substr(at, length));
        }
        at += length == 0 ? 1 : length;
    }
    return at < text.size() ? out + "..." : out;
}

std::string in_quotes(std::string_view text) {
    return '"' + printable(text) + '"';
}

}  // namespace lily
