# Builds for a Mac with Apple silicon, on Linux: zig's compiler and linker, our headers, and stubs of the frameworks.
# ZIG in the environment names zig. What comes out has run nowhere; tests/test_macos.py looks at what it is.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_CXX_COMPILER ${CMAKE_CURRENT_LIST_DIR}/compiler)
set(CMAKE_OBJCXX_COMPILER ${CMAKE_CURRENT_LIST_DIR}/compiler)
set(CMAKE_CXX_COMPILER_WORKS ON)
set(CMAKE_OBJCXX_COMPILER_WORKS ON)
set(CMAKE_AR ${CMAKE_CURRENT_LIST_DIR}/archiver CACHE FILEPATH "")
set(CMAKE_RANLIB true CACHE FILEPATH "")
set(CMAKE_INSTALL_NAME_TOOL llvm-install-name-tool-22 CACHE FILEPATH "")
set(CMAKE_OSX_SYSROOT "" CACHE STRING "")
