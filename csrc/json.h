// Json: a strict reader of JSON text. It refuses whatever two readers could understand differently (duplicate
// keys, numbers that do not fit, invalid UTF-8, trailing text) and bounds what a hostile text can make it
// allocate.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace lily {

// Malformed text ("line 3, column 14: ...") or a value of another kind than the caller asked for.
struct JsonError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Json {
   public:
    using Array = std::vector<Json>;
    using Object = std::map<std::string, Json, std::less<>>;

    static Json parse(std::string_view text);

    bool is_null() const { return std::holds_alternative<std::nullptr_t>(value_); }
    bool is_boolean() const { return std::holds_alternative<bool>(value_); }
    bool is_integer() const { return std::holds_alternative<int64_t>(value_); }
    bool is_string() const { return std::holds_alternative<std::string>(value_); }
    bool is_object() const { return std::holds_alternative<Object>(value_); }

    // The value; throws JsonError when it is of another kind. number() also takes an integer.
    bool boolean() const { return get<bool>("true or false"); }
    int64_t integer() const { return get<int64_t>("an integer"); }
    double number() const { return is_integer() ? static_cast<double>(integer()) : get<double>("a number"); }
    const std::string& string() const { return get<std::string>("a string"); }
    const Array& array() const { return get<Array>("an array"); }
    const Object& object() const { return get<Object>("an object"); }

    // The member of that name; null when there is none, when it is JSON's null, or when this is no object.
    const Json* find(std::string_view key) const;

    // For an error message: a scalar as it is written (long strings cut), otherwise its kind.
    std::string describe() const;

   private:
    friend class JsonParser;

    template <class T>
    const T& get(const char* wanted) const {
        if (const T* value = std::get_if<T>(&value_)) return *value;
        throw JsonError(std::string("wanted ") + wanted + ", got " + describe());
    }

    std::variant<std::nullptr_t, bool, int64_t, double, std::string, Array, Object> value_ = nullptr;
};

// Text from a file, made fit for an error message: control characters escaped, cut at a character border when
// long.
std::string printable(std::string_view text);
std::string in_quotes(std::string_view text);

}  // namespace lily
