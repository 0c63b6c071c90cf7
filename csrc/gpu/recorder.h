// Recorder: puts barriers between dispatches, and only where one needs what an earlier one did.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/device.h"

namespace lily {

class Recorder {
   public:
    // concurrent: otherwise a barrier lies between any two dispatches.
    Recorder(Device& device, bool concurrent) : device_(device), concurrent_(concurrent) {}

    // Dispatches, after a barrier if the dispatch touches what one since the last barrier wrote, or writes
    // what one read.
    void dispatch(const Dispatch& dispatch);

    // As Device: commit() begins a stage without a barrier, where the device has begun, and so does wait()
    // where it then stands still.
    uint64_t commit();
    void wait(uint64_t number);

    // Waits for the device. The next dispatch needs no barrier.
    void finish();

    // The op that the next dispatches belong to.
    void begin(const char* op) { op_ = op; }
    const char* op() const { return op_; }

    int64_t dispatches() const { return dispatches_; }
    int64_t stages() const { return stages_; }  // runs of dispatches without a barrier between them

   private:
    bool conflicts(const Binding& binding) const;

    Device& device_;
    const bool concurrent_;
    const char* op_ = "";
    std::vector<Binding> touched_;  // since the last barrier
    int64_t dispatches_ = 0, stages_ = 0;
};

}  // namespace lily
