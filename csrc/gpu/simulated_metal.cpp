// Where there is no Metal: metal.mm on a simulated one, from a library that tools/metal/apple/build.py makes.
#include <dlfcn.h>

#include "error.h"
#include "gpu/device.h"

namespace lily {

namespace {

// A function of the library; null if there is no such library.
template <class Function>
Function found(const std::string& file, const char* name) {
    if (file.empty()) return nullptr;
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays: its code may run until the end
    return library ? reinterpret_cast<Function>(dlsym(library, name)) : nullptr;
}

}  // namespace

bool has_metal(const std::string& file) {
    const auto has = found<bool (*)()>(file, "lily_has_metal");
    return has && has();
}

std::string metal_facts(const std::string& file) {
    const auto facts = found<const char* (*)()>(file, "lily_metal_facts");
    return facts ? facts() : "";
}

std::unique_ptr<Device> make_metal(const MetalSettings& settings) {
    const std::string& file = settings.file;
    if (file.empty())
        throw DeviceError("option device: metal wants a Mac with Apple silicon. Use device=\"cpu\".");
    const auto make = found<Device* (*)(const MetalSettings&)>(file, "lily_make_metal");
    if (!make)
        throw DeviceError("option kernels: wanted a library of tools/metal/apple/build.py, got '" + file +
                          "'");
    return std::unique_ptr<Device>(make(settings));
}

}  // namespace lily
