// A safetensors file is an 8-byte little-endian length, that many bytes of JSON, then the tensors' bytes.
#include "safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <set>
#include <system_error>

#include "error.h"

namespace lily {

static_assert(std::endian::native == std::endian::little,
              "tensors are read in place, as little-endian values");

namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own reader
constexpr size_t kMaxJsonBytes = 100'000'000;
constexpr size_t kMaxRank = 8;

// Every type of the format, by the bits of one element. Lily computes with few of them; the others may
// belong to tensors that it skips.
const std::map<std::string, int, std::less<>> kTypeBits = {
    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"BOOL", 8},        {"U8", 8},   {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"I16", 16}, {"U16", 16},
    {"F16", 16},    {"BF16", 16},   {"I32", 32},    {"U32", 32},        {"F32", 32}, {"I64", 64},
    {"U64", 64},    {"F64", 64},    {"C64", 64},    {"F8_E5M2FNUZ", 8},
};

std::string reason(int error) {
    return std::generic_category().message(error);
}

[[noreturn]] void fail(const std::string& path, const std::string& what) {
    throw ModelFilesError(path + ": " + what);
}

// Opens a regular file. Never blocks, whatever the path turns out to be.
int open_regular(const std::string& path, size_t& size) {
    struct stat link = {}, target = {};
    if (::lstat(path.c_str(), &link) != 0) {
        fail(path, errno == ENOENT ? "no such file (incomplete download?). Download it, or check the path."
                                   : reason(errno) + ".");
    }
    if (::stat(path.c_str(), &target) != 0) {
        const int error = errno;
        std::error_code ignored;
        const std::string to = fs::read_symlink(path, ignored).string();
        if (error == ENOENT)
            fail(path,
                 "is a link to " + to + ", which does not exist (incomplete download?)." + kDownloadAgain);
        fail(path, "is a link to " + to + ": " + reason(error) + ".");
    }
    if (S_ISDIR(target.st_mode))
        fail(path, "wanted a file, got a folder. Give the folder that holds config.json.");
    if (!S_ISREG(target.st_mode)) fail(path, "wanted a regular file, got a device, pipe or socket.");
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) fail(path, "cannot be opened: " + reason(errno) + ". Check its permissions.");
    if (::fstat(file, &target) != 0 || !S_ISREG(target.st_mode)) {
        ::close(file);
        fail(path, "changed while it was being opened. Try again.");
    }
    size = static_cast<size_t>(target.st_size);
    return file;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
    size_t size = 0;
    const int file = open_regular(path, size);
    void* memory = size == 0 ? MAP_FAILED : ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
    const int error = errno;
    ::close(file);
    if (size == 0) fail(path, std::string("is empty: wanted data, got 0 bytes.") + kDownloadAgain);
    if (memory == MAP_FAILED) fail(path, "cannot be mapped into memory: " + reason(error) + ".");
    bytes_ = {static_cast<std::byte*>(memory), size};
    if (text().starts_with("version https://git-lfs.github.com/spec/")) {
        ::munmap(memory, size);
        fail(path, "is a Git LFS pointer of " + std::to_string(size) +
                       " bytes, not the file it points to. Run `git lfs pull` in that folder, or download "
                       "the file.");
    }
}

MappedFile::~MappedFile() {
    ::munmap(bytes_.data(), bytes_.size());
}

Json read_json(const std::string& path) {
    const MappedFile file(path);
    if (file.bytes().size() > kMaxJsonBytes) {
        fail(path, "wanted JSON of at most 100 MB, got " + std::to_string(file.bytes().size()) + " bytes.");
    }
    try {
        Json json = Json::parse(file.text());
        if (!json.is_object()) throw JsonError("wanted an object, got " + json.describe());
        return json;
    } catch (const JsonError& error) {
        fail(path, std::string("is not the JSON it should be: ") + error.what() + "." + kDownloadAgain);
    }
}

std::string shape_text(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

namespace {

struct Entry {
    StoredTensor tensor;
    uint64_t begin = 0;
    uint64_t end = 0;
};

// Bytes of a tensor; no value when they are no whole number or too many to count.
bool bytes_wanted(const std::vector<int64_t>& shape, int bits, uint64_t& bytes) {
    uint64_t total = static_cast<uint64_t>(bits);
    for (const int64_t n : shape) {
        if (n != 0 && total > std::numeric_limits<uint64_t>::max() / static_cast<uint64_t>(n)) return false;
        total *= static_cast<uint64_t>(n);
    }
    bytes = total / 8;
    return total % 8 == 0;
}

int64_t natural(const Json& json, const char* what) {
    const int64_t value = json.integer();
    if (value < 0) throw JsonError(std::string(what) + " " + std::to_string(value) + " is negative");
    return value;
}

Entry read_entry(const std::string& name, const Json& json) {
    const auto field = [&](const char* key) -> const Json& {
        if (!json.is_object()) throw JsonError("wanted an object, got " + json.describe());
        if (const Json* found = json.find(key)) return *found;
        throw JsonError(std::string("has no ") + key);
    };
    Entry entry;
    entry.tensor.name = name;
    entry.tensor.type = field("dtype").string();
    const auto type = kTypeBits.find(entry.tensor.type);
    if (type == kTypeBits.end()) throw JsonError("unknown dtype " + in_quotes(entry.tensor.type));

    const Json::Array& shape = field("shape").array();
    if (shape.size() > kMaxRank)
        throw JsonError("a shape of " + std::to_string(shape.size()) + " dimensions");
    for (const Json& n : shape) entry.tensor.shape.push_back(natural(n, "the dimension"));

    const Json::Array& offsets = field("data_offsets").array();
    if (offsets.size() != 2)
        throw JsonError("wanted two data_offsets, got " + std::to_string(offsets.size()));
    entry.begin = static_cast<uint64_t>(natural(offsets[0], "the offset"));
    entry.end = static_cast<uint64_t>(natural(offsets[1], "the offset"));
    if (entry.begin > entry.end) throw JsonError("its data_offsets end before they begin");

    uint64_t wanted = 0;
    const bool countable = bytes_wanted(entry.tensor.shape, type->second, wanted);
    if (!countable || wanted != entry.end - entry.begin) {
        throw JsonError(
            entry.tensor.type + " " + shape_text(entry.tensor.shape) + " wanted " +
            (countable ? std::to_string(wanted) + " bytes" : "a whole number of bytes that fits 64 bits") +
            ", its data_offsets span " + std::to_string(entry.end - entry.begin));
    }
    return entry;
}

std::vector<Entry> read_entries(const std::string& path, std::string_view header) {
    std::vector<Entry> entries;
    std::string where = "the header";
    try {
        const Json json = Json::parse(header);
        for (const auto& [name, value] : json.object()) {
            where = name == "__metadata__" ? "the header's __metadata__" : "tensor " + in_quotes(name);
            if (name != "__metadata__") {
                entries.push_back(read_entry(name, value));
                continue;
            }
            for (const auto& [key, note] : value.object()) note.string();
        }
    } catch (const JsonError& error) {
        fail(path, where + ": " + error.what() + "." + kDownloadAgain);
    }
    return entries;
}

// Every byte belongs to exactly one tensor, as the format demands: a file with holes, overlaps or a tail was
// not written by any of its writers, so it is damaged or made to be read differently by different programs.
void check_layout(const std::string& path, std::vector<Entry>& entries, uint64_t start, uint64_t size) {
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
        return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
    });
    uint64_t at = 0;
    const Entry* previous = nullptr;
    for (const Entry& entry : entries) {
        const std::string name = "tensor " + in_quotes(entry.tensor.name);
        if (entry.end > size - start) {
            uint64_t last = 0;
            for (const Entry& e : entries) last = std::max(last, e.end);
            fail(path, "is cut short: its header wanted " + std::to_string(start + last) + " bytes, got " +
                           std::to_string(size) + "; " + name + " does not fit (incomplete download?)." +
                           kDownloadAgain);
        }
        if (entry.begin < at)
            fail(path, name + " overlaps tensor " + in_quotes(previous->tensor.name) + "." + kDownloadAgain);
        if (entry.begin > at) {
            fail(path, std::to_string(entry.begin - at) + " bytes before " + name + " belong to no tensor." +
                           kDownloadAgain);
        }
        at = entry.end;
        previous = &entry;
    }
    if (at != size - start) {
        fail(path, "wanted " + std::to_string(start + at) + " bytes by its header, got " +
                       std::to_string(size) + ": the rest belongs to no tensor." + kDownloadAgain);
    }
}

}  // namespace

std::vector<StoredTensor> read_header(const MappedFile& file) {
    const std::string& path = file.path();
    const uint64_t size = file.bytes().size();
    if (size < 8) {
        fail(path, "is no safetensors file: wanted at least 8 bytes, got " + std::to_string(size) + "." +
                       kDownloadAgain);
    }
    uint64_t length = 0;
    std::memcpy(&length, file.bytes().data(), 8);
    if (length > kMaxHeaderBytes) {
        fail(path, "is no safetensors file: wanted a header of at most " + std::to_string(kMaxHeaderBytes) +
                       " bytes, got a length of " + std::to_string(length) + "." + kDownloadAgain);
    }
    if (length > size - 8) {
        fail(path, "is cut short: wanted a header of " + std::to_string(length) + " bytes, got " +
                       std::to_string(size - 8) + " (incomplete download?)." + kDownloadAgain);
    }
    std::vector<Entry> entries = read_entries(path, file.text().substr(8, length));
    check_layout(path, entries, 8 + length, size);

    std::vector<StoredTensor> tensors;
    for (Entry& entry : entries) {
        entry.tensor.file = &file;
        entry.tensor.bytes = file.bytes().subspan(8 + length + entry.begin, entry.end - entry.begin);
        tensors.push_back(std::move(entry.tensor));
    }
    return tensors;
}

namespace {

// Whether opening the file can succeed or at least tell why not: false for no entry and for a link to
// nowhere.
bool present(const fs::path& path) {
    std::error_code ignored;
    return fs::status(path, ignored).type() != fs::file_type::not_found;
}

bool is_link(const fs::path& path) {
    std::error_code ignored;
    return fs::symlink_status(path, ignored).type() == fs::file_type::symlink;
}

std::vector<std::string> list_folder(const std::string& directory) {
    std::vector<std::string> names;
    std::error_code error;
    for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
         entry.increment(error)) {
        names.push_back(entry->path().filename().string());
    }
    if (error) fail(directory, "cannot be listed: " + error.message() + ".");
    std::sort(names.begin(), names.end());
    return names;
}

std::vector<std::string> model_files(const std::vector<std::string>& names) {
    std::vector<std::string> found;
    for (const std::string& name : names) {
        if (name.starts_with("model") && name.ends_with(".safetensors")) found.push_back(name);
    }
    return found;
}

void read_index(const fs::path& path, WeightFiles& files) {
    const Json index = read_json(path.string());
    try {
        const Json* map = index.find("weight_map");
        if (!map) throw JsonError("has no weight_map");
        for (const auto& [tensor, file] : map->object()) {
            const std::string& name = file.string();
            // An index is data from elsewhere: it may choose among the folder's files, not among the
            // machine's.
            if (!name.ends_with(".safetensors") || fs::path(name).filename() != name ||
                name.find('\0') != std::string::npos) {
                throw JsonError("weight_map: wanted a .safetensors file of the same folder, got " +
                                in_quotes(name));
            }
            files.home[tensor] = name;
        }
        if (files.home.empty()) throw JsonError("its weight_map is empty");
    } catch (const JsonError& error) {
        fail(path.string(), std::string(error.what()) + "." + kDownloadAgain);
    }
}

// model-00002-of-00004.safetensors: the numbers say which siblings must exist.
std::vector<std::string> siblings(const std::string& name) {
    const size_t of = name.find("-of-");
    const size_t dot = name.rfind(".safetensors");
    if (of == std::string::npos || dot == std::string::npos || dot <= of + 4 || dot - of - 4 > 5) return {};
    const std::string total = name.substr(of + 4, dot - of - 4);
    const size_t dash = name.rfind('-', of - 1);
    if (dash == std::string::npos || total.find_first_not_of("0123456789") != std::string::npos) return {};
    std::vector<std::string> names;
    for (int i = 1; i <= std::atoi(total.c_str()); ++i) {
        std::string number = std::to_string(i);
        number.insert(0, of - dash - 1 > number.size() ? of - dash - 1 - number.size() : 0, '0');
        names.push_back(name.substr(0, dash + 1) + number + name.substr(of));
    }
    return names;
}

[[noreturn]] void fail_without_weights(const std::string& directory, const std::vector<std::string>& names) {
    std::string got;
    for (const std::string& name : names) {
        const std::string extension = fs::path(name).extension().string();
        if (extension == ".gguf" || extension == ".bin" || extension == ".pt" || extension == ".npz" ||
            extension == ".safetensors") {
            got = name;
        }
    }
    fail(directory, "has no weights: wanted model.safetensors or model-*.safetensors, got " +
                        (got.empty() ? "no such file" : in_quotes(got)) +
                        ". Download the MLX checkpoint's .safetensors files into it.");
}

}  // namespace

WeightFiles find_weight_files(const std::string& directory) {
    const fs::path folder(directory), index = folder / "model.safetensors.index.json";
    const std::vector<std::string> names = list_folder(directory);
    const std::vector<std::string> models = model_files(names);
    WeightFiles files;
    std::set<std::string> wanted;
    if (present(index) || is_link(index)) {
        read_index(index, files);
        for (const auto& [tensor, file] : files.home) wanted.insert(file);
    } else if (models.empty()) {
        fail_without_weights(directory, names);
    } else if (std::find(models.begin(), models.end(), "model.safetensors") != models.end()) {
        wanted.insert("model.safetensors");
    } else {
        wanted.insert(models.begin(), models.end());
        for (const std::string& name : models) {
            for (const std::string& sibling : siblings(name)) wanted.insert(sibling);
        }
    }
    for (const std::string& name : wanted) {
        if (present(folder / name)) continue;
        std::error_code ignored;
        const std::string to =
            is_link(folder / name) ? fs::read_symlink(folder / name, ignored).string() : "";
        files.missing.push_back(name + (to.empty() ? "" : " (a link to " + to + ", which does not exist)"));
    }
    // A stale index names files that never were: whatever is here may still hold every tensor.
    if (!files.missing.empty()) wanted.insert(models.begin(), models.end());
    for (const std::string& name : wanted) {
        if (present(folder / name)) files.present.push_back((folder / name).string());
    }
    return files;
}

}  // namespace lily
