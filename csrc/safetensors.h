// Safetensors files: finding a checkpoint's files, mapping them, and checking their headers.
// Knows the container only; what the tensors mean is weights.cpp's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "json.h"

namespace lily {

// What an error about a damaged file ends with.
inline constexpr const char* kDownloadAgain = " Download the file again.";

// A regular, non-empty file, mapped read-only for as long as this lives. Throws ModelFilesError.
class MappedFile {
   public:
    explicit MappedFile(const std::string& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    const std::string& path() const { return path_; }
    std::span<std::byte> bytes() const { return bytes_; }  // must not be written
    std::string_view text() const { return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}; }

   private:
    std::string path_;
    std::span<std::byte> bytes_;
};

// Reads a small JSON file. Throws ModelFilesError that names the file and the place in it.
Json read_json(const std::string& path);

// One entry of a header, checked: the bytes lie inside the file and are as many as type and shape ask for.
struct StoredTensor {
    std::string name;
    std::string type;  // as the format spells it: "BF16"
    std::vector<int64_t> shape;
    std::span<std::byte> bytes;  // at any address: writers do not align them
    const MappedFile* file = nullptr;
};

// A file's tensors in the order of their bytes. Throws ModelFilesError unless every byte belongs to exactly
// one.
std::vector<StoredTensor> read_header(const MappedFile& file);

// "[256, 512]"
std::string shape_text(const std::vector<int64_t>& shape);

// The weight files of a checkpoint's folder.
struct WeightFiles {
    std::vector<std::string> present;         // paths
    std::vector<std::string> missing;         // names that the index, or the others' numbering, asks for
    std::map<std::string, std::string> home;  // tensor -> file name, as the index has it; empty without one
};

// Throws ModelFilesError when there are none or the index is damaged. Missing ones are reported, not thrown:
// an index may name files that the checkpoint never had.
WeightFiles find_weight_files(const std::string& directory);

}  // namespace lily
