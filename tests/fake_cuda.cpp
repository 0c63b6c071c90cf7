// A stand-in for libcuda.so.1 on machines without a GPU: memory is the host's, kernels do nothing. Calls that
// matter to tests/test_cuda.py go into the file $FAKE_CUDA_LOG, a line each; the n-th call of a function
// fails where $FAKE_CUDA_FAIL says "function n".
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

enum : int { kSuccess = 0, kLaunchFailed = 719 };

void log(const std::string& line) {
    if (FILE* file = std::fopen(std::getenv("FAKE_CUDA_LOG"), "a")) {
        std::fprintf(file, "%s\n", line.c_str());
        std::fclose(file);
    }
}

int called(const std::string& function) {
    static std::map<std::string, int> counts;
    const char* fails = std::getenv("FAKE_CUDA_FAIL");
    const bool this_one = fails && fails == function + " " + std::to_string(++counts[function]);
    if (this_one) log("fails");
    return this_one ? kLaunchFailed : kSuccess;
}

struct Node {
    const char* function;
    unsigned groups[3], threads[3], shared;
    void** parameters;
};

using Graph = std::vector<std::string>;

}  // namespace

extern "C" {
int cuInit(unsigned) {
    return kSuccess;
}
int cuDeviceGet(int* device, int) {
    return *device = 0;
}
int cuDeviceGetName(char* name, int bytes, int) {
    return std::snprintf(name, bytes, "fake") * 0;
}
int cuDeviceGetAttribute(int* value, int which, int) {
    *value = which == 75 ? 9 : which == 16 ? 132 : which == 97 ? 1 << 17 : 0;
    return kSuccess;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
    *context = nullptr;
    return kSuccess;
}
int cuDevicePrimaryCtxRelease_v2(int) {
    return kSuccess;
}
int cuCtxSetCurrent(void*) {
    return kSuccess;
}
int cuMemGetInfo_v2(size_t* room, size_t* all) {
    *room = *all = size_t{1} << 34;
    return kSuccess;
}
int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
    *address = reinterpret_cast<unsigned long long>(std::calloc(1, bytes));
    return kSuccess;
}
int cuMemFree_v2(unsigned long long address) {
    std::free(reinterpret_cast<void*>(address));
    return kSuccess;
}
int cuMemHostAlloc(void** p, size_t bytes, unsigned) {
    *p = std::calloc(1, bytes);
    return kSuccess;
}
int cuMemFreeHost(void* p) {
    std::free(p);
    return kSuccess;
}
int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, void*) {
    std::memset(reinterpret_cast<void*>(to), value, bytes);
    return kSuccess;
}
int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void*) {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
    return kSuccess;
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void*) {
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return kSuccess;
}
int cuStreamCreate(void**, unsigned) {
    return kSuccess;
}
int cuStreamDestroy_v2(void*) {
    return kSuccess;
}
int cuStreamSynchronize(void*) {
    return kSuccess;
}
int cuEventCreate(void**, unsigned) {
    return kSuccess;
}
int cuEventDestroy_v2(void*) {
    return kSuccess;
}
int cuEventRecord(void*, void*) {
    return kSuccess;
}
int cuEventSynchronize(void*) {
    return kSuccess;
}
int cuEventElapsedTime(float*, void*, void*) {
    return kSuccess;
}
int cuModuleLoadDataEx(void** module, const void*, unsigned, int*, void**) {
    *module = nullptr;
    return called("cuModuleLoadDataEx");
}
int cuModuleUnload(void*) {
    return kSuccess;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
    static std::map<std::string, std::string> names;
    *function = const_cast<char*>((names[name] = name).c_str());
    return called("cuModuleGetFunction");
}
int cuFuncGetAttribute(int*, int, void*) {
    return kSuccess;
}
int cuFuncSetAttribute(void*, int, int) {
    return kSuccess;
}
int cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void*, void**, void**) {
    if (const int fault = called("cuLaunchKernel")) return fault;
    log(static_cast<const char*>(function));
    return kSuccess;
}
int cuGraphCreate(void** graph, unsigned) {
    *graph = new Graph;
    log("graph made");
    return kSuccess;
}
int cuGraphDestroy(void* graph) {
    delete static_cast<Graph*>(graph);
    log("graph gone");
    return kSuccess;
}
int cuGraphAddKernelNode_v2(void** node, void* graph, void* const*, size_t, const Node* given) {
    *node = graph;
    static_cast<Graph*>(graph)->emplace_back(given->function);
    return called("cuGraphAddKernelNode_v2");
}
int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
    if (const int fault = called("cuGraphInstantiateWithFlags")) return fault;
    *executable = new Graph(*static_cast<Graph*>(graph));
    log("executable made");
    return kSuccess;
}
int cuGraphExecDestroy(void* executable) {
    delete static_cast<Graph*>(executable);
    log("executable gone");
    return kSuccess;
}
int cuGraphExecKernelNodeSetParams_v2(void*, void*, const Node*) {
    return called("cuGraphExecKernelNodeSetParams_v2");
}
int cuGraphLaunch(void* executable, void*) {
    if (const int fault = called("cuGraphLaunch")) return fault;
    for (const std::string& function : *static_cast<Graph*>(executable)) log(function);
    return kSuccess;
}
int cuGetErrorName(int, const char** name) {
    *name = "CUDA_ERROR_LAUNCH_FAILED";
    return kSuccess;
}
int cuGetErrorString(int, const char** text) {
    *text = "unspecified launch failure";
    return kSuccess;
}
}
