// What the other parts of the simulated framework ask of the Objective-C runtime.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#ifdef __OBJC__
using Object = id;
#else
using Object = struct ObjectPart*;
#endif
using Selector = const char*;
using Implementation = Object (*)(Object, Selector, ...);

// "CLASS COUNT" a line, of objects that are alive.
std::string lily_objc_alive();
