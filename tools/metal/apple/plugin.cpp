// What csrc/gpu/simulated_metal.cpp loads.
#include "gpu/device.h"

extern "C" __attribute__((visibility("default"))) lily::Device* lily_make_metal(
    const lily::MetalSettings& settings) {
    return lily::make_metal(settings).release();
}
extern "C" __attribute__((visibility("default"))) bool lily_has_metal() {
    return lily::has_metal("");
}
extern "C" __attribute__((visibility("default"))) const char* lily_metal_facts() {
    thread_local std::string facts;
    facts = lily::metal_facts("");
    return facts.c_str();
}
