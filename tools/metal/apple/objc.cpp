// A small Objective-C runtime: Apple's ABI (clang -fobjc-runtime=macosx) on ELF and x86-64. Classes and
// categories, what automatic reference counting calls, autorelease pools, blocks. It counts objects, and ends
// the program at a message to one that is gone, to none that understands it, or at a release too many.
#include "objc.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

extern "C" {
// As clang writes them: the layouts of objc4's objc-runtime-new.h.
struct Method {
    Selector name;
    const char* types;
    Implementation implementation;
};
struct MethodList {
    uint32_t entry_bytes, count;
    Method methods[];
};
struct InstanceVariable {
    int32_t* offset;
    const char *name, *type;
    uint32_t alignment, bytes;
};
struct InstanceVariables {
    uint32_t entry_bytes, count;
    InstanceVariable variables[];
};
struct ClassData {
    uint32_t flags, start, bytes, reserved;
    const uint8_t* layout;
    const char* name;
    MethodList* methods;
    void* protocols;
    InstanceVariables* variables;
    const uint8_t* weak_layout;
    void* properties;
};
struct ClassObject {
    ClassObject *isa, *super;
    void *cache, *table;
    ClassData* data;
};
struct Category {
    const char* name;
    ClassObject* of;
    MethodList *methods, *class_methods;
};

extern ClassObject* __start_objc_classlist[] __attribute__((weak, visibility("hidden")));
extern ClassObject* __stop_objc_classlist[] __attribute__((weak, visibility("hidden")));
extern Selector __start_objc_selrefs[] __attribute__((weak, visibility("hidden")));
extern Selector __stop_objc_selrefs[] __attribute__((weak, visibility("hidden")));
extern Category* __start_objc_catlist[] __attribute__((weak, visibility("hidden")));
extern Category* __stop_objc_catlist[] __attribute__((weak, visibility("hidden")));

struct objc_cache {
    int unused;
} _objc_empty_cache;
ClassObject __CFConstantStringClassReference;  // what constant strings say they are
void *_NSConcreteStackBlock[32], *_NSConcreteGlobalBlock[32], *_NSConcreteMallocBlock[32];
}

namespace {

constexpr uint32_t kMeta = 1;  // of ClassData::flags
constexpr uint64_t kAlive = 0x4c494c594f424a31, kGone = 0x4c494c59474f4e45;

struct Header {  // in front of every object
    std::atomic<int64_t> references;
    uint64_t state;
};

[[noreturn]] void fault(const char* what, const char* name, const char* selector = "") {
    std::fprintf(stderr, "objc: %s %s %s\n", what, name, selector);
    std::abort();
}

struct Tables {
    std::mutex mutex;
    std::unordered_map<std::string, Selector> selectors;
    std::unordered_map<ClassObject*, std::unordered_map<Selector, Implementation>> methods;
    std::map<std::string, ClassObject*> classes;
    std::map<std::string, int64_t> alive;  // objects by class
    int64_t blocks = 0;
};

Tables& tables() {
    static auto* const made = new Tables;  // outlives every object
    return *made;
}

Header* header_of(Object object) {
    return reinterpret_cast<Header*>(object) - 1;
}
ClassObject* class_of(Object object) {
    return *reinterpret_cast<ClassObject**>(object);
}
bool is_class(Object object) {
    return class_of(object)->data->flags & kMeta;
}

Selector intern(const char* name) {
    Tables& t = tables();
    const std::lock_guard lock(t.mutex);
    const auto [found, is_new] = t.selectors.try_emplace(name, nullptr);
    if (is_new) found->second = strdup(name);
    return found->second;
}

void add_methods(ClassObject* to, MethodList* list) {
    if (!list) return;
    auto* at = reinterpret_cast<std::byte*>(list->methods);
    for (uint32_t i = 0; i < list->count; ++i, at += list->entry_bytes & 0xfffc) {
        const auto* method = reinterpret_cast<Method*>(at);
        tables().methods[to][intern(method->name)] = method->implementation;
    }
}

// Moves a class's own variables behind those of its superclass, which may have grown.
void lay_out(ClassObject* c) {
    if (!c->super) return;
    const uint32_t inherited = c->super->data->bytes;
    if (inherited > c->data->start && c->data->variables) {
        const uint32_t moved = (inherited - c->data->start + 15) & ~15u;
        for (uint32_t i = 0; i < c->data->variables->count; ++i)
            if (int32_t* offset = c->data->variables->variables[i].offset)
                *offset += static_cast<int32_t>(moved);
        c->data->bytes += moved;
    } else if (inherited > c->data->bytes) {
        c->data->bytes = inherited;
    }
}

void add_class(ClassObject* c, std::set<ClassObject*>& added) {
    if (!c || !added.insert(c).second) return;
    add_class(c->super, added);
    lay_out(c);
    add_methods(c, c->data->methods);
    add_methods(c->isa, c->isa->data->methods);
    tables().classes[c->data->name] = c;
    if (!std::strcmp(c->data->name, "NSConstantString")) {
        __CFConstantStringClassReference = *c;
        tables().methods[&__CFConstantStringClassReference] = tables().methods[c];
    }
}

__attribute__((constructor)) void load_image() {
    for (Selector* s = __start_objc_selrefs; s < __stop_objc_selrefs; ++s) *s = intern(*s);
    std::set<ClassObject*> added;
    for (ClassObject** c = __start_objc_classlist; c < __stop_objc_classlist; ++c) add_class(*c, added);
    for (Category** c = __start_objc_catlist; c < __stop_objc_catlist; ++c) {
        add_methods((*c)->of, (*c)->methods);
        add_methods((*c)->of->isa, (*c)->class_methods);
    }
}

// After load_image() the tables of methods only serve.
Implementation own_method(ClassObject* c, Selector s) {
    const auto of = tables().methods.find(c);
    if (of == tables().methods.end()) return nullptr;
    const auto found = of->second.find(s);
    return found == of->second.end() ? nullptr : found->second;
}

Implementation find_method(ClassObject* c, Selector s) {
    for (; c; c = c->super)
        if (const Implementation found = own_method(c, s)) return found;
    return nullptr;
}

Implementation method_of(Object self, Selector s, ClassObject* c) {
    struct Entry {
        ClassObject* c;
        Selector s;
        Implementation i;
    };
    thread_local Entry cache[1024];
    if (!(c->data->flags & kMeta) && c != &__CFConstantStringClassReference &&
        header_of(self)->state == kGone)
        fault("a message to a deallocated", c->data->name, s);
    Entry& entry = cache[(reinterpret_cast<uintptr_t>(c) >> 4 ^ reinterpret_cast<uintptr_t>(s) >> 3) % 1024];
    if (entry.c != c || entry.s != s) {
        const Implementation found = find_method(c, s);
        if (!found) fault("an unrecognised selector:", c->data->name, s);
        entry = {c, s, found};
    }
    return entry.i;
}

Object answer_of_nil(Object, Selector, ...) {
    return nullptr;
}

// Blocks: the layout of libclosure's Block_private.h.
constexpr int kHasHelpers = 1 << 25, kIsByrefOnHeap = 1 << 24;
struct Block {
    void* isa;
    int flags;
    std::atomic<int> references;
    void (*invoke)(void*);
    struct {
        unsigned long reserved, bytes;
        void (*copy)(void*, const void*);
        void (*dispose)(void*);
    }* descriptor;
};
static_assert(sizeof(std::atomic<int>) == sizeof(int));

bool is_block(const void* object) {
    void* const isa = *static_cast<void* const*>(object);
    return isa == _NSConcreteStackBlock || isa == _NSConcreteGlobalBlock || isa == _NSConcreteMallocBlock;
}

bool is_counted(Object object) {
    return object && !is_class(object) && class_of(object) != &__CFConstantStringClassReference;
}

void count(const char* name, int64_t change) {
    Tables& t = tables();
    const std::lock_guard lock(t.mutex);
    t.alive[name] += change;
}

thread_local std::vector<Object> pool;  // null: where a pool begins
thread_local int pools = 0;

}  // namespace

extern "C" {

Implementation lily_objc_method(Object self, Selector s) {
    return self ? method_of(self, s, class_of(self)) : answer_of_nil;
}
struct Super {
    Object self;
    ClassObject* from;
};
Implementation lily_objc_super_method(Super* super, Selector s) {
    return method_of(super->self, s, super->from->super);
}

// Keeps every register that may hold an argument, looks the method up, and jumps there.
asm(R"(
.text
.macro keep
  pushq %rbp
  movq %rsp, %rbp
  subq $0xc0, %rsp
  movdqa %xmm0, 0x00(%rsp)
  movdqa %xmm1, 0x10(%rsp)
  movdqa %xmm2, 0x20(%rsp)
  movdqa %xmm3, 0x30(%rsp)
  movdqa %xmm4, 0x40(%rsp)
  movdqa %xmm5, 0x50(%rsp)
  movdqa %xmm6, 0x60(%rsp)
  movdqa %xmm7, 0x70(%rsp)
  movq %rdi, 0x80(%rsp)
  movq %rsi, 0x88(%rsp)
  movq %rdx, 0x90(%rsp)
  movq %rcx, 0x98(%rsp)
  movq %r8, 0xa0(%rsp)
  movq %r9, 0xa8(%rsp)
  movq %rax, 0xb0(%rsp)
.endm
.macro give_back
  movq %rax, %r11
  movdqa 0x00(%rsp), %xmm0
  movdqa 0x10(%rsp), %xmm1
  movdqa 0x20(%rsp), %xmm2
  movdqa 0x30(%rsp), %xmm3
  movdqa 0x40(%rsp), %xmm4
  movdqa 0x50(%rsp), %xmm5
  movdqa 0x60(%rsp), %xmm6
  movdqa 0x70(%rsp), %xmm7
  movq 0x80(%rsp), %rdi
  movq 0x88(%rsp), %rsi
  movq 0x90(%rsp), %rdx
  movq 0x98(%rsp), %rcx
  movq 0xa0(%rsp), %r8
  movq 0xa8(%rsp), %r9
  movq 0xb0(%rsp), %rax
  leave
.endm
.globl objc_msgSend
.hidden objc_msgSend
.type objc_msgSend, @function
objc_msgSend:
  keep
  call lily_objc_method@PLT
  give_back
  jmp *%r11
.globl objc_msgSend_stret
.hidden objc_msgSend_stret
.type objc_msgSend_stret, @function
objc_msgSend_stret:
  keep
  movq %rsi, %rdi
  movq %rdx, %rsi
  call lily_objc_method@PLT
  give_back
  jmp *%r11
.globl objc_msgSendSuper2
.hidden objc_msgSendSuper2
.type objc_msgSendSuper2, @function
objc_msgSendSuper2:
  keep
  call lily_objc_super_method@PLT
  give_back
  movq (%rdi), %rdi
  jmp *%r11
)");
Object objc_msgSend(Object, Selector, ...);

Object class_createInstance(ClassObject* c, size_t extra) {
    auto* header = static_cast<Header*>(std::calloc(1, sizeof(Header) + c->data->bytes + extra));
    header->references = 1;
    header->state = kAlive;
    const auto object = reinterpret_cast<Object>(header + 1);
    *reinterpret_cast<ClassObject**>(object) = c;
    static const Selector construct = intern(".cxx_construct");
    std::vector<ClassObject*> chain;
    for (ClassObject* k = c; k; k = k->super) chain.push_back(k);
    for (auto k = chain.rbegin(); k != chain.rend(); ++k)
        if (const Implementation i = own_method(*k, construct)) i(object, construct);
    count(c->data->name, 1);
    return object;
}

void object_dispose(Object object) {
    static const Selector destruct = intern(".cxx_destruct");
    ClassObject* const c = class_of(object);
    for (ClassObject* k = c; k; k = k->super)
        if (const Implementation i = own_method(k, destruct)) i(object, destruct);
    count(c->data->name, -1);
    header_of(object)->state = kGone;
    std::free(header_of(object));
}

void* _Block_copy(const void* given) {
    auto* block = static_cast<Block*>(const_cast<void*>(given));
    if (!block || block->isa == _NSConcreteGlobalBlock) return block;
    if (block->isa == _NSConcreteMallocBlock) {
        ++block->references;
        return block;
    }
    auto* copy = static_cast<Block*>(std::malloc(block->descriptor->bytes));
    std::memcpy(static_cast<void*>(copy), given, block->descriptor->bytes);
    copy->isa = _NSConcreteMallocBlock;
    copy->references = 1;
    if (block->flags & kHasHelpers) block->descriptor->copy(copy, block);
    count("block", 1);
    return copy;
}
void _Block_release(const void* given) {
    auto* block = static_cast<Block*>(const_cast<void*>(given));
    if (!block || block->isa != _NSConcreteMallocBlock || --block->references) return;
    if (block->flags & kHasHelpers) block->descriptor->dispose(block);
    std::free(block);
    count("block", -1);
}

Object objc_retain(Object object) {
    if (!object) return object;
    if (is_block(object)) {
        if (reinterpret_cast<Block*>(object)->isa == _NSConcreteMallocBlock) _Block_copy(object);
        return object;  // a block on the stack is nobody's: objc_retainBlock copies it
    }
    if (!is_counted(object)) return object;
    if (header_of(object)->state != kAlive) fault("a retain of a deallocated object", "");
    ++header_of(object)->references;
    return object;
}
void objc_release(Object object) {
    if (!object) return;
    if (is_block(object)) return _Block_release(object);
    if (!is_counted(object)) return;
    if (header_of(object)->state != kAlive) fault("a release of a deallocated object", "");
    if (--header_of(object)->references) return;
    static const Selector dealloc = intern("dealloc");
    lily_objc_method(object, dealloc)(object, dealloc);
}

// What a block captures: objects (3), blocks (7). No captured variable is __block, so there is no 8.
void _Block_object_assign(void* to, const void* from, int kind) {
    if ((kind & 31) == 8) fault("a __block variable, which this runtime has not", "");
    auto* object = static_cast<Object>(const_cast<void*>(from));
    *static_cast<Object*>(to) = (kind & 31) == 3   ? objc_retain(object)
                                : (kind & 31) == 7 ? static_cast<Object>(_Block_copy(object))
                                                   : object;
}
void _Block_object_dispose(const void* from, int kind) {
    if ((kind & 31) == 3 || (kind & 31) == 7) objc_release(static_cast<Object>(const_cast<void*>(from)));
}

void* objc_autoreleasePoolPush() {
    pool.push_back(nullptr);
    ++pools;
    return reinterpret_cast<void*>(pool.size());
}
void objc_autoreleasePoolPop(void* token) {
    while (pool.size() >= reinterpret_cast<size_t>(token)) {
        const Object object = pool.back();
        pool.pop_back();
        objc_release(object);
    }
    --pools;
}
Object objc_autorelease(Object object) {
    if (!object) return object;
    if (pools == 0) count("autoreleased without a pool", 1);  // and so never released
    pool.push_back(object);
    return object;
}
Object objc_autoreleaseReturnValue(Object object) {
    return objc_autorelease(object);
}
Object objc_retainAutorelease(Object object) {
    return objc_autorelease(objc_retain(object));
}
Object objc_retainAutoreleaseReturnValue(Object object) {
    return objc_retainAutorelease(object);
}
Object objc_retainAutoreleasedReturnValue(Object object) {
    return objc_retain(object);
}
Object objc_claimAutoreleasedReturnValue(Object object) {
    return objc_retain(object);
}
Object objc_unsafeClaimAutoreleasedReturnValue(Object object) {
    return object;
}
Object objc_retainBlock(Object object) {
    return static_cast<Object>(_Block_copy(object));
}
void objc_storeStrong(Object* place, Object value) {
    const Object before = *place;
    if (before == value) return;
    objc_retain(value);
    *place = value;
    objc_release(before);
}

Object objc_alloc(ClassObject* c) {
    return objc_msgSend(reinterpret_cast<Object>(c), intern("alloc"));
}
Object objc_alloc_init(ClassObject* c) {
    return objc_msgSend(objc_alloc(c), intern("init"));
}
Object objc_opt_new(ClassObject* c) {
    return objc_alloc_init(c);
}
Object objc_opt_self(Object object) {
    return object;
}
ClassObject* objc_opt_class(Object object) {
    return is_class(object) ? reinterpret_cast<ClassObject*>(object) : class_of(object);
}
bool objc_opt_respondsToSelector(Object object, Selector s) {
    return object && find_method(class_of(object), s);
}
bool objc_opt_isKindOfClass(Object object, ClassObject* wanted) {
    for (ClassObject* c = object ? class_of(object) : nullptr; c; c = c->super)
        if (c == wanted) return true;
    return false;
}
void objc_enumerationMutation(Object) {
    fault("a collection changed while it was walked", "");
}
Object objc_getProperty(Object self, Selector, ptrdiff_t offset, bool) {
    return objc_retainAutorelease(*reinterpret_cast<Object*>(reinterpret_cast<std::byte*>(self) + offset));
}
void objc_setProperty_nonatomic(Object self, Selector, Object value, ptrdiff_t offset) {
    objc_storeStrong(reinterpret_cast<Object*>(reinterpret_cast<std::byte*>(self) + offset), value);
}
void objc_setProperty_nonatomic_copy(Object self, Selector s, Object value, ptrdiff_t offset) {
    objc_setProperty_nonatomic(self, s, value, offset);  // nothing here is mutable
}
void objc_setProperty_atomic(Object self, Selector s, Object value, ptrdiff_t offset) {
    objc_setProperty_nonatomic(self, s, value, offset);
}
void objc_setProperty_atomic_copy(Object self, Selector s, Object value, ptrdiff_t offset) {
    objc_setProperty_nonatomic(self, s, value, offset);
}
void objc_copyStruct(void* to, const void* from, ptrdiff_t bytes, bool, bool) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // extern "C"

std::string lily_objc_alive() {
    Tables& t = tables();
    const std::lock_guard lock(t.mutex);
    std::string text;
    for (const auto& [name, number] : t.alive)
        if (number) text += name + " " + std::to_string(number) + "\n";
    return text;
}
