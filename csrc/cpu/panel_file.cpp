#include "cpu/panel_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace lily {

namespace {

constexpr size_t kHeader = 4096;           // of the file: a page, so that panels begin on one
constexpr size_t kMost = size_t{1} << 30;  // of a write: systems take 2 GiB at most

std::string reason(int error) {
    return std::generic_category().message(error);
}

bool write_all(int file, const void* from, size_t bytes) {
    const char* at = static_cast<const char*>(from);
    while (bytes > 0) {
        const ssize_t written = ::write(file, at, std::min(bytes, kMost));
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return false;
        at += written;
        bytes -= static_cast<size_t>(written);
    }
    return true;
}

// A descriptor that is closed, with its locks, at the end.
struct Descriptor {
    int number;
    ~Descriptor() {
        if (number >= 0) ::close(number);
    }
};

// Whether a path still leads to an open file.
bool leads_to(const std::string& path, int file) {
    struct stat named, opened;
    return ::stat(path.c_str(), &named) == 0 && ::fstat(file, &opened) == 0 &&
           named.st_ino == opened.st_ino && named.st_dev == opened.st_dev;
}

}  // namespace

PanelFile::PanelFile(const Weights& weights, const Kernels& kernels, size_t bytes, const std::string& where,
                     const Notice& notice)
    : bytes_(bytes), notice_(notice) {
    if (where.empty()) return;
    const std::filesystem::path beside = weights.directory, folder = where;
    path_ = where == "beside" ? beside / "lily" : folder / weights.fingerprint;
    path_ += std::string("-") + kernels.name + ".panels";
    header_ = std::string("Lily's packed matrices\nlayout ") + kernels.name + " " + kPanelLayout +
              "\nfingerprint " + weights.fingerprint + "\nbytes " + std::to_string(bytes) + "\n";
    header_.resize(kHeader, '\0');
}

void PanelFile::tell(const std::string& what) const {
    if (notice_) notice_("Packed matrices: " + path_ + " " + what);
}

Memory PanelFile::map() const {
    if (path_.empty()) return nullptr;
    const Descriptor file{::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    struct stat about;
    if (file.number < 0 || ::fstat(file.number, &about) != 0) {
        if (errno != ENOENT) tell("cannot be read: " + reason(errno) + ".");
        return nullptr;
    }
    const size_t size = kHeader + bytes_;
    std::string begins(kHeader, '\0');
    if (!S_ISREG(about.st_mode) || static_cast<size_t>(about.st_size) != size ||
        ::pread(file.number, begins.data(), kHeader, 0) != static_cast<ssize_t>(kHeader) ||
        begins != header_) {
        tell("is not of this checkpoint and code path, or damaged; it is made anew.");
        return nullptr;
    }
    void* memory = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.number, 0);
    if (memory == MAP_FAILED) {
        tell("cannot be mapped: " + reason(errno) + ".");
        return nullptr;
    }
    const auto unmap = [size](std::byte* panels) { ::munmap(panels - kHeader, size); };
    return Memory(static_cast<std::byte*>(memory) + kHeader, unmap);
}

bool PanelFile::write(int file, const std::function<bool(const Put&)>& fill) const {
    const auto put = [&](const std::byte* from, size_t bytes) { return write_all(file, from, bytes); };
    return ::ftruncate(file, 0) == 0 && write_all(file, header_.data(), kHeader) && fill(put) &&
           ::fsync(file) == 0;
}

// Written under another name by one process at a time, which has it locked: what a process that was killed
// left there is written over by the next.
Memory PanelFile::make(const std::function<bool(const Put&)>& fill) const {
    if (path_.empty()) return nullptr;
    const std::string unfinished = path_ + ".new";
    std::error_code ignored;  // what it is about shows when the file is opened
    std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), ignored);
    const Descriptor file{::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666)};
    if (file.number < 0) {
        tell("cannot be written: " + reason(errno) + ".");
        return nullptr;
    }
    if (::flock(file.number, LOCK_EX | LOCK_NB) != 0 || !leads_to(unfinished, file.number)) {
        tell("is being written by another process.");
        return nullptr;
    }
    if (!write(file.number, fill) || ::rename(unfinished.c_str(), path_.c_str()) != 0) {
        tell("cannot be written: " + reason(errno) + ".");
        ::unlink(unfinished.c_str());
        return nullptr;
    }
    tell("is written: " + std::to_string(bytes_ >> 20) + " MiB.");
    return map();
}

}  // namespace lily
