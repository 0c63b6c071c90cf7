#include "gpu/recorder.h"

#include <algorithm>

namespace lily {

bool Recorder::conflicts(const Binding& binding) const {
    const auto* begin = static_cast<const std::byte*>(binding.data);
    return std::any_of(touched_.begin(), touched_.end(), [&](const Binding& other) {
        const auto* from = static_cast<const std::byte*>(other.data);
        return (binding.written || other.written) && begin < from + other.bytes &&
               from < begin + binding.bytes;
    });
}

void Recorder::dispatch(const Dispatch& dispatch) {
    bool waits = !concurrent_ || touched_.empty();  // the first begins a stage without a barrier
    const Binding grid = Binding::read(dispatch.indirect, dispatch.indirect ? sizeof dispatch.groups : 0);
    const auto lists = {dispatch.buffers, dispatch.reached, std::span(&grid, 1)};
    for (const auto& list : lists)
        for (const Binding& binding : list) waits = waits || conflicts(binding);
    if (waits) {
        if (!touched_.empty()) device_.barrier();
        touched_.clear();
        ++stages_;
    }
    for (const auto& list : lists) touched_.insert(touched_.end(), list.begin(), list.end());
    device_.dispatch(dispatch);
    ++dispatches_;
}

uint64_t Recorder::commit() {
    if (device_.overlaps()) touched_.clear();
    return device_.commit();
}

void Recorder::wait(uint64_t number) {
    device_.wait(number);
    if (!device_.overlaps()) touched_.clear();
}

void Recorder::finish() {
    device_.finish();
    touched_.clear();
}

}  // namespace lily
