// Panels in a file, so that they are packed once and mapped at every later load. Nothing about that file is
// an error: one that does not fit is made anew, and where none can be written loading goes on without it.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "cpu/kernels.h"
#include "error.h"
#include "state.h"
#include "weights.h"

namespace lily {

class PanelFile {
   public:
    // where: the option repack_cache.  bytes: of the panels.
    PanelFile(const Weights&, const Kernels&, size_t bytes, const std::string& where, const Notice&);

    // The panels, read-only; null if there is no such file, or it is not of these weights and kernels.
    Memory map() const;

    // Takes a run of bytes of the panels; whether they could be written.
    using Put = std::function<bool(const std::byte*, size_t)>;
    // Makes the file, of what `fill` puts, in the place of one that is there, and maps it. Null if it could
    // not be made, or another process is making it. fill(put) returns whether all could be put.
    Memory make(const std::function<bool(const Put&)>& fill) const;

   private:
    void tell(const std::string& what) const;
    bool write(int file, const std::function<bool(const Put&)>& fill) const;

    std::string path_;    // empty: there is none and shall be none
    std::string header_;  // what the file must begin with
    size_t bytes_;
    const Notice& notice_;
};

}  // namespace lily
