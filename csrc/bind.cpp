// The Python module lily._core: the only file that knows Python. It checks types and shapes, drops the GIL,
// and calls.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>

#include "error.h"
#include "gpu/device.h"
#include "gpu/dry.h"
#include "options.h"
#include "session.h"
#include "weights.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily {
namespace {

// Raises lily.errors.NAME. Messages quote paths, and a path need not be UTF-8.
void raise(const char* name, const char* message) {
    try {
        const nb::object type = nb::module_::import_("lily.errors").attr(name);
        const nb::object text = nb::steal(
            PyUnicode_DecodeUTF8(message, static_cast<Py_ssize_t>(std::strlen(message)), "backslashreplace"));
        PyErr_SetObject(type.ptr(), text.ptr());
    } catch (nb::python_error& error) {
        error.restore();
    }
}

void translate(const std::exception_ptr& exception, void*) {
    try {
        std::rethrow_exception(exception);
    } catch (const ModelFilesError& error) {
        raise("ModelFilesError", error.what());
    } catch (const ContextError& error) {
        raise("ContextError", error.what());
    } catch (const MemoryLimitError& error) {
        raise("MemoryLimitError", error.what());
    } catch (const DeviceError& error) {
        raise("DeviceError", error.what());
    } catch (const Error& error) {
        raise("LilyError", error.what());
    }
}

// Python's Weights: a share in a loaded checkpoint.
struct SharedWeights {
    std::shared_ptr<const Weights> weights;

    explicit SharedWeights(const std::filesystem::path& directory)
        : weights(load_weights(directory.string())) {}
};

nb::object quantisation_dict(const Quantisation& q) {
    if (q.bits == 0) return nb::none();
    nb::dict d;
    d["bits"] = q.bits;
    d["group"] = q.group;
    return d;
}

nb::dict config_dict(const Config& c) {
    nb::dict d;
    d["layers"] = c.layers;
    d["hidden"] = c.hidden;
    d["vocab"] = c.vocab;
    d["norm_epsilon"] = c.norm_epsilon;
    d["max_positions"] = c.max_positions;
    d["heads"] = c.heads;
    d["kv_heads"] = c.kv_heads;
    d["head_dim"] = c.head_dim;
    d["rotary_dim"] = c.rotary_dim;
    d["rope_theta"] = c.rope_theta;
    d["key_heads"] = c.key_heads;
    d["value_heads"] = c.value_heads;
    d["key_dim"] = c.key_dim;
    d["value_dim"] = c.value_dim;
    d["conv_taps"] = c.conv_taps;
    d["experts"] = c.experts;
    d["experts_per_token"] = c.experts_per_token;
    d["expert_width"] = c.expert_width;
    d["shared_width"] = c.shared_width;
    d["tied"] = c.tied;
    d["attention"] = nb::cast(c.attention);
    d["quantisation"] = quantisation_dict(c.quantisation);
    nb::dict exceptions;
    for (const auto& [module, q] : c.override) exceptions[module.c_str()] = quantisation_dict(q);
    d["override"] = exceptions;
    return d;
}

// Calls visit(name, tensor) for every tensor of the model that is there, under the core's own names.
template <class Visit>
void each_tensor(const Weights& weights, const Visit& visit) {
    const auto vector = [&](const std::string& name, const Tensor& tensor) {
        if (tensor) visit(name, tensor);
    };
    const auto linear = [&](const std::string& name, const Linear& l) {
        vector(name + ".weight", l.weight);
        vector(name + ".scales", l.scales);
        vector(name + ".biases", l.biases);
    };
    linear("embedding", weights.embedding);
    linear("head", weights.head);
    vector("norm", weights.norm);
    for (size_t l = 0; l < weights.layers.size(); ++l) {
        const LayerWeights& w = weights.layers[l];
        const std::string path = "layers." + std::to_string(l) + ".";
        vector(path + "input_norm", w.input_norm);
        vector(path + "post_norm", w.post_norm);
        linear(path + "gdn.in_qkv", w.gdn.in_qkv);
        linear(path + "gdn.in_z", w.gdn.in_z);
        linear(path + "gdn.in_b", w.gdn.in_b);
        linear(path + "gdn.in_a", w.gdn.in_a);
        linear(path + "gdn.out", w.gdn.out);
        vector(path + "gdn.conv", w.gdn.conv);
        vector(path + "gdn.a_log", w.gdn.a_log);
        vector(path + "gdn.dt_bias", w.gdn.dt_bias);
        vector(path + "gdn.norm", w.gdn.norm);
        linear(path + "attn.q", w.attn.q);
        linear(path + "attn.k", w.attn.k);
        linear(path + "attn.v", w.attn.v);
        linear(path + "attn.out", w.attn.out);
        vector(path + "attn.q_norm", w.attn.q_norm);
        vector(path + "attn.k_norm", w.attn.k_norm);
        linear(path + "moe.router", w.moe.router);
        linear(path + "moe.gate", w.moe.gate);
        linear(path + "moe.up", w.moe.up);
        linear(path + "moe.down", w.moe.down);
        linear(path + "moe.shared_gate", w.moe.shared_gate);
        linear(path + "moe.shared_up", w.moe.shared_up);
        linear(path + "moe.shared_down", w.moe.shared_down);
        linear(path + "moe.shared_expert_gate", w.moe.shared_expert_gate);
    }
}

nb::list tensor_table(const SharedWeights& self) {
    nb::list table;
    each_tensor(*self.weights, [&](const std::string& name, const Tensor& tensor) {
        const std::vector<int64_t> shape(tensor.shape.begin(), tensor.shape.begin() + tensor.rank);
        table.append(nb::make_tuple(name, name_of(tensor.dtype), nb::tuple(nb::cast(shape))));
    });
    return table;
}

nb::bytes tensor_bytes(const SharedWeights& self, const std::string& wanted) {
    nb::bytes found;
    bool known = false;
    each_tensor(*self.weights, [&](const std::string& name, const Tensor& tensor) {
        if (name != wanted) return;
        found = nb::bytes(tensor.data, tensor.bytes());
        known = true;
    });
    if (!known) throw std::invalid_argument("no tensor is named " + wanted + "; tensor_table() lists them");
    return found;
}

void bind_weights(nb::module_& m) {
    nb::class_<SharedWeights>(m, "Weights", "A checkpoint's files, checked and mapped.")
        .def(nb::init<const std::filesystem::path&>(), "directory"_a,
             nb::call_guard<nb::gil_scoped_release>(),
             nb::sig("def __init__(self, directory: str | os.PathLike[str]) -> None"))
        .def_prop_ro(
            "config", [](const SharedWeights& self) { return config_dict(self.weights->config); },
            nb::for_getter(nb::sig("def config(self) -> dict[str, typing.Any]")), "The model's dimensions.")
        .def_prop_ro(
            "nbytes", [](const SharedWeights& self) { return self.weights->bytes; },
            "Bytes of the bound tensors.")
        .def_prop_ro(
            "tensors", [](const SharedWeights& self) { return self.weights->tensors; }, "How many are bound.")
        .def_prop_ro(
            "skipped", [](const SharedWeights& self) { return self.weights->skipped; },
            "Vision and multi-token-prediction tensors, not read.")
        .def_prop_ro("warnings", [](const SharedWeights& self) { return self.weights->warnings; })
        .def_prop_ro(
            "fingerprint", [](const SharedWeights& self) { return self.weights->fingerprint; },
            "Equal for equal checkpoints, however sharded.")
        .def("tensor_table", &tensor_table,
             "Name, type and shape of every bound tensor, under the core's names.",
             nb::sig("def tensor_table(self) -> list[tuple[str, str, tuple[int, ...]]]"))
        .def("tensor_bytes", &tensor_bytes, "name"_a, "A copy of one bound tensor's bytes.",
             nb::sig("def tensor_bytes(self, name: str) -> bytes"));
}

using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatArray = nb::ndarray<nb::numpy, float>;

std::span<const int32_t> span_of(const Tokens& tokens) {
    return {tokens.data(), tokens.shape(0)};
}

std::span<const uint32_t> span_of(const std::optional<Mask>& mask) {
    return mask ? std::span(mask->data(), mask->shape(0)) : std::span<const uint32_t>();
}

// A NumPy array that owns its memory.
FloatArray new_array(std::initializer_list<size_t> shape) {
    size_t size = 1;
    for (size_t n : shape) size *= n;
    auto data = std::make_unique<float[]>(size);
    float* pointer = data.release();
    return FloatArray(pointer, shape,
                      nb::capsule(pointer, [](void* p) noexcept { delete[] static_cast<float*>(p); }));
}

// Leaves a call with what ends a thread silently, once the interpreter is ending: a thread that asked for the
// GIL after that would be torn out of the core.
void check_ending(const std::atomic<bool>& ending) {
    if (!ending) return;
    PyErr_SetNone(PyExc_SystemExit);
    throw nb::python_error();
}

// Progress into Python: takes the GIL back, and lets Ctrl-C through even when nobody listens.
Progress progress_of(const nb::object& callback, const std::atomic<bool>& ending) {
    return [&callback, &ending](int64_t done, int64_t total) {
        nb::gil_scoped_acquire gil;
        check_ending(ending);
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (!callback.is_none()) callback(done, total);
    };
}

Options options_of(const std::map<std::string, std::string>& given) {
    Options options = options_from_environment();
    for (const auto& [name, value] : given) options.set(name, value);
    options.check();
    return options;
}

// The same between layers, where a large model's chunk takes seconds: often enough for a person who waits,
// seldom enough that taking the GIL, for which others may have to be waited for, costs nothing.
Interrupt interrupt_of(const nb::object& callback, const std::atomic<bool>& ending) {
    using Clock = std::chrono::steady_clock;
    return [&callback, &ending, last = Clock::now()]() mutable {
        if (Clock::now() - last < std::chrono::milliseconds(50)) return;
        nb::gil_scoped_acquire gil;
        check_ending(ending);
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (!callback.is_none()) callback();
        last = Clock::now();
    };
}

// What Python holds as a Session: the core's, with the options it was made with.
struct PySession {
    Options options;
    std::shared_ptr<const Weights> weights;
    std::unique_ptr<Session> session;
    std::atomic<int> calls{0};        // that drop the GIL and are under way
    std::atomic<bool> ending{false};  // the interpreter is

    PySession(const SharedWeights& checkpoint, const std::map<std::string, std::string>& given,
              const nb::object& notice)
        : options(options_of(given)), weights(checkpoint.weights) {
        const DType kv = kv_type(options.kv);
        const int chunk =
            static_cast<int>(std::min<int64_t>(prefill_chunk(options), weights->config.max_positions));
        const auto tell = [&notice](const std::string& what) {
            nb::gil_scoped_acquire gil;
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
            if (!notice.is_none()) notice(what);
        };
        nb::gil_scoped_release no_gil;
        session = std::make_unique<Session>(weights, make_ops(*weights, options, chunk, kv, tell), chunk, kv,
                                            options.decode_batch);
    }

    const LayerWeights& layer(int index) const {
        if (index < 0 || index >= weights->config.layers)
            throw nb::index_error(
                format("layer: wanted 0 to %d, got %d", weights->config.layers - 1, index).c_str());
        return weights->layers[static_cast<size_t>(index)];
    }
};

// A call that drops the GIL, from before it does until after it has it again.
class Call {
   public:
    explicit Call(PySession& session) : session_(session) { ++session_.calls; }
    ~Call() { --session_.calls; }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    PySession& session_;
};

nb::tuple layer_state(PySession& s, const State& state, int index) {
    s.session->check_own(state);
    const Config& c = s.weights->config;
    const LayerWeights& layer = s.layer(index);
    const auto n = [](auto value) { return static_cast<size_t>(value); };
    FloatArray first, second;
    if (layer.attention) {
        first = new_array({n(c.kv_heads), n(state.length()), n(c.head_dim)});
        second = new_array({n(c.kv_heads), n(state.length()), n(c.head_dim)});
    } else {
        first = new_array({n(c.conv_taps - 1), n(c.channels())});
        second = new_array({n(c.value_heads), n(c.value_dim), n(c.key_dim)});
    }
    s.session->ops().read_state(layer, state, first.data(), second.data());
    return nb::make_tuple(first, second);
}

// A NumPy array of bytes that somebody else owns.
nb::object byte_array(const std::shared_ptr<const std::byte>& bytes, size_t size) {
    if (!bytes) return nb::none();
    auto* share = new std::shared_ptr<const std::byte>(bytes);
    const nb::capsule owner(
        share, [](void* p) noexcept { delete static_cast<std::shared_ptr<const std::byte>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(bytes.get(), {size}, owner));
}

nb::tuple parts_of(PySession& s, const State& state) {
    StateParts parts;
    {
        nb::gil_scoped_release no_gil;
        parts = s.session->parts(state);
    }
    const StateLayout& layout = state.layout();
    nb::list pages;
    for (const auto& page : parts.pages) pages.append(byte_array(page, layout.page));
    return nb::make_tuple(pages, byte_array(parts.recurrent, layout.recurrent),
                          byte_array(parts.logits, layout.logits));
}

std::vector<State> restore(PySession& s, int file, size_t bytes, int64_t pages,
                           const std::vector<std::tuple<int64_t, int64_t, int64_t>>& states) {
    std::vector<SavedState> saved;
    for (const auto& [length, recurrent, logits] : states) saved.push_back({length, recurrent, logits});
    const nb::gil_scoped_release no_gil;
    return s.session->restore(map_file(file, bytes), bytes, pages, saved);
}

// ---- One step at a time, for tests and benchmarks

struct NamedActivation {
    const char* name;
    Tensor tensor;
};

std::vector<NamedActivation> activations_of(PySession& s) {
    const Activations& a = s.session->ops().activations();
    return {
#define LILY_FIELD(name, width, type) {#name, a.name},
        LILY_ACTIVATIONS(LILY_FIELD)
#undef LILY_FIELD
    };
}

Tensor activation(PySession& s, const std::string& name) {
    s.session->ops().finish();
    for (const NamedActivation& a : activations_of(s))
        if (name == a.name) return a.tensor;
    throw std::invalid_argument("no activation '" + name + "'");
}

void set_activation(PySession& s, const std::string& name,
                    const nb::ndarray<const float, nb::ndim<2>, nb::c_contig>& rows) {
    const Tensor t = activation(s, name);
    if (static_cast<int64_t>(rows.shape(0)) > t.shape[0] || static_cast<int64_t>(rows.shape(1)) != t.shape[1])
        throw std::invalid_argument(format("%s: wanted at most %lld rows of %lld, got %zu of %zu",
                                           name.c_str(), static_cast<long long>(t.shape[0]),
                                           static_cast<long long>(t.shape[1]), rows.shape(0), rows.shape(1)));
    Ops& ops = s.session->ops();
    auto* to = static_cast<std::byte*>(t.data);
    if (t.dtype == DType::f32) {
        ops.copy(to, reinterpret_cast<const std::byte*>(rows.data()), rows.size() * sizeof(float));
    } else {
        const std::vector<int32_t> whole(rows.data(), rows.data() + rows.size());
        ops.copy(to, reinterpret_cast<const std::byte*>(whole.data()), whole.size() * sizeof(int32_t));
    }
}

FloatArray get_activation(PySession& s, const std::string& name, size_t rows) {
    const Tensor t = activation(s, name);
    if (static_cast<int64_t>(rows) > t.shape[0])
        throw std::invalid_argument("rows: more than the activation holds");
    s.session->ops().finish();
    FloatArray out = new_array({rows, static_cast<size_t>(t.shape[1])});
    std::vector<std::byte> held(out.size() * bytes_of(t.dtype));
    s.session->ops().copy(held.data(), static_cast<const std::byte*>(t.data), held.size());
    const auto* integers = reinterpret_cast<const int32_t*>(held.data());
    if (t.dtype == DType::f32)
        std::memcpy(out.data(), held.data(), held.size());
    else
        std::copy_n(integers, out.size(), out.data());
    return out;
}

// A batch of what some sequences take in next, with the memory that its spans show.
struct OwnBatch {
    std::vector<int32_t> tokens;
    std::vector<Segment> segments;

    OwnBatch(PySession& s, const std::vector<std::pair<State*, Tokens>>& parts) {
        for (const auto& [state, ids] : parts) {
            s.session->check_own(*state);
            const auto span = span_of(ids);
            state->prepare(static_cast<int64_t>(span.size()), s.session->ops());
            segments.push_back(
                {state, static_cast<int>(tokens.size()), static_cast<int>(span.size()), state->length()});
            tokens.insert(tokens.end(), span.begin(), span.end());
        }
        if (batch().rows > s.session->ops().activations().x.shape[0])
            throw std::invalid_argument("tokens: more than a pass holds");
    }
    Batch batch() const { return {tokens, segments, static_cast<int>(tokens.size())}; }
};

void run_step(PySession& s, const std::string& name, int index, const Batch& batch) {
    Ops& ops = s.session->ops();
    if (name == "embed") return ops.embed(s.weights->embedding, batch);
    if (name == "nothing") return ops.nothing();
    using Step = void (Ops::*)(const LayerWeights&, const Batch&);
    static const std::map<std::string, Step> kSteps = {
        {"gdn_in", &Ops::gdn_in},       {"gdn_mix", &Ops::gdn_mix},   {"gdn_out", &Ops::gdn_out},
        {"attn_in", &Ops::attn_in},     {"attn_mix", &Ops::attn_mix}, {"attn_out", &Ops::attn_out},
        {"moe_route", &Ops::moe_route}, {"moe_up", &Ops::moe_up},     {"moe_down", &Ops::moe_down},
    };
    const auto step = kSteps.find(name);
    if (step == kSteps.end()) throw std::invalid_argument("no op '" + name + "'");
    (ops.*step->second)(s.layer(index), batch);
}

void run_op(PySession& s, const std::string& name, int index,
            const std::vector<std::pair<State*, Tokens>>& parts) {
    const OwnBatch own(s, parts);
    Ops& ops = s.session->ops();
    if (name == "forward") return forward(*s.weights, ops, own.batch());
    ops.begin(own.batch());
    run_step(s, name, index, own.batch());
}

// Seconds that the host was at each of a list of ops, run over and over on a batch as one run of work; the
// last one's include the wait for a device that works on its own. What the host does for a pass is left out;
// head and sample are of the first row.
std::vector<double> time_ops(PySession& s, const std::vector<std::pair<std::string, int>>& list, int times,
                             const std::vector<std::pair<State*, Tokens>>& parts) {
    const OwnBatch own(s, parts);
    Session& session = *s.session;
    Ops& ops = session.ops();
    const auto vocab = static_cast<size_t>(s.weights->config.vocab);
    const Memory logits = ops.allocate(vocab * sizeof(float));
    const auto run = [&](const auto& after_each) {
        for (size_t i = 0; i < list.size(); ++i) {
            const auto& [name, layer] = list[i];
            if (name == "head")
                ops.head(*s.weights, 0, 1, reinterpret_cast<float*>(logits.get()));
            else if (name == "sample")
                ops.sample({reinterpret_cast<const float*>(logits.get()), vocab}, {}, {});
            else
                run_step(s, name, layer, own.batch());
            after_each(i);
        }
    };
    using Clock = std::chrono::steady_clock;
    std::vector<double> seconds(list.size());
    const nb::gil_scoped_release no_gil;
    ops.begin(own.batch());
    run([](size_t) {});  // warms up
    ops.finish();
    auto last = Clock::now();
    const auto take = [&](size_t i) {
        const auto now = Clock::now();
        seconds[i] += std::chrono::duration<double>(now - last).count();
        last = now;
    };
    for (int i = 0; i < times; ++i) run(take);
    ops.finish();
    if (!list.empty()) take(list.size() - 1);
    return seconds;
}

// Python's Sampling(...) has the numbers as doubles and logit_bias as a dict.
void make_sampling(Sampling* place, double temperature, int top_k, double top_p, double min_p,
                   double repetition_penalty, double presence_penalty, double frequency_penalty,
                   const std::map<int32_t, double>& logit_bias, uint64_t seed) {
    const auto number = [](double value) { return static_cast<float>(value); };
    new (place) Sampling{.temperature = number(temperature),
                         .top_k = top_k,
                         .top_p = number(top_p),
                         .min_p = number(min_p),
                         .repetition_penalty = number(repetition_penalty),
                         .presence_penalty = number(presence_penalty),
                         .frequency_penalty = number(frequency_penalty),
                         .seed = seed};
    for (const auto& [token, bias] : logit_bias) place->bias.push_back({token, number(bias)});
}

void bind_sampling(nb::module_& m) {
    const Sampling none;
    nb::class_<Sampling>(m, "Sampling", "What tokens are drawn by; by default, the best each time.")
        .def("__init__", &make_sampling, nb::kw_only(), "temperature"_a = none.temperature,
             "top_k"_a = none.top_k, "top_p"_a = none.top_p, "min_p"_a = none.min_p,
             "repetition_penalty"_a = none.repetition_penalty, "presence_penalty"_a = none.presence_penalty,
             "frequency_penalty"_a = none.frequency_penalty, "logit_bias"_a = std::map<int32_t, double>(),
             "seed"_a = none.seed);

    nb::class_<History>(m, "History", "The tokens of an answer so far, counted for the penalties.")
        .def(nb::init<>())
        .def("add", &History::add, "token"_a, "Count a token once more; Session.step does so by itself.")
        .def_prop_ro(
            "counts",
            [](const History& history) {
                std::map<int32_t, int32_t> counts;
                for (const auto& [token, count] : history.counts()) counts[token] = count;
                return counts;
            },
            "How often each token is there.");
}

#define LILY_ALLOWED "allowed: numpy.typing.NDArray[numpy.uint32] | None = None"
#define LILY_CALLBACKS                                                     \
    "progress: collections.abc.Callable[[int, int], None] | None = None, " \
    "interrupt: collections.abc.Callable[[], None] | None = None"

void bind_traffic(nb::module_& m) {
    nb::class_<Traffic>(m, "Traffic", "What a dispatch asks of a stretch of memory: declared, and as seen.")
        .def_ro("bytes", &Traffic::bytes, "Bound.")
        .def_ro("reads", &Traffic::reads, "Declared: bytes of these that it reads, each counted once.")
        .def_ro("writes", &Traffic::writes, "Declared: bytes that it writes.")
        .def_ro("read_lines", &Traffic::read_lines, "Seen: distinct lines of 64 bytes that it read.")
        .def_ro("written_lines", &Traffic::written_lines, "Seen: such lines that it wrote.")
        .def_ro("asked_read", &Traffic::asked_read, "Seen: bytes that all threads together asked for.")
        .def_ro("asked_written", &Traffic::asked_written, "Seen: bytes that all threads together gave.")
        .def_ro("accesses", &Traffic::accesses, "Seen: accesses of SIMD-groups.")
        .def_ro("sectors", &Traffic::sectors, "Seen: sectors of 32 bytes, each counted once an access.")
        .def_ro("lines", &Traffic::lines, "Seen: lines of 128 bytes, each counted once an access.");
    nb::class_<RecordedDispatch>(m, "Dispatch", "One launch of a GPU kernel.")
        .def_ro("kernel", &RecordedDispatch::kernel)
        .def_ro("op", &RecordedDispatch::op, "The step of the model that it belongs to.")
        .def_ro("stage", &RecordedDispatch::stage, "Barriers before it.")
        .def_ro("groups", &RecordedDispatch::groups, "Threadgroups.")
        .def_ro("threads", &RecordedDispatch::threads, "Of a threadgroup.")
        .def_ro("memory", &RecordedDispatch::memory, "In the order of its declarations.");
}

void bind_session(nb::module_& m) {
    nb::class_<State>(m, "State", "Everything one sequence leaves behind after its tokens.")
        .def_prop_ro("length", &State::length, "Tokens taken in so far.")
        .def_prop_ro("nbytes", &State::bytes,
                     "Bytes of memory this state refers to, shared with forks or not.")
        .def("fork", &State::fork,
             "A copy that shares memory until one of the two is extended; of a state that nobody is "
             "extending.")
        .def_prop_ro("has_logits", &State::has_logits, "Whether the logits of the last token are at hand.");
    m.def(
        "bytes_of", [](const std::vector<const State*>& states) { return bytes_of(std::span(states)); },
        "states"_a, "Bytes of memory that some states refer to together: what they share counts once.");

    nb::class_<PySession>(m, "Session", "A checkpoint on a device, and the loops that drive it.")
        .def(nb::init<const SharedWeights&, const std::map<std::string, std::string>&, const nb::object&>(),
             "weights"_a, "options"_a, "notice"_a = nb::none(),
             nb::sig(
                 "def __init__(self, weights: Weights, options: Mapping[str, str], notice: Callable[[str], "
                 "object] | None = None) -> None"),
             "notice: called with a sentence for what takes long, before it is done.")
        .def_prop_ro(
            "device", [](PySession& s) { return s.session->ops().name(); }, "The backend and its code path.")
        .def_prop_ro(
            "threads", [](PySession& s) { return s.session->ops().threads(); },
            "Threads that share the work.")
        .def_prop_ro(
            "packed_bytes", [](PySession& s) { return s.session->ops().packed_bytes(); },
            "Bytes of matrices that are kept in another order than the files'; 0 where they are used in "
            "place.")
        .def_prop_ro(
            "scratch_bytes", [](PySession& s) { return s.session->ops().scratch_bytes(); },
            "Bytes allocated besides weights and states; fixed when the session is made.")
        .def_prop_ro(
            "room", [](PySession& s) { return s.session->ops().room(); },
            "Bytes that the device's memory has left for states; None if it does not say.")
        .def_prop_ro(
            "options", [](PySession& s) { return s.options.values(); }, "The options in force.")
        .def_prop_ro(
            "kept_bytes", [](PySession& s) { return s.session->kept().bytes(); },
            "Bytes of the states that are kept, each block of memory once.")
        .def(
            "cost", [](PySession& s, const State& state) { return s.session->kept().cost(state); }, "state"_a,
            "Bytes by which keeping a state would add to kept_bytes.")
        .def(
            "keep",
            [](PySession& s, const State& state, size_t budget) {
                s.session->check_own(state);
                return s.session->kept().keep(state, budget);
            },
            "state"_a, "budget"_a,
            "Count a state among those that are kept; False, and nothing done, if they would take up more "
            "than "
            "the budget.")
        .def(
            "let_go", [](PySession& s, const State& state) { s.session->kept().let_go(state); }, "state"_a,
            "Undo keep.")
        .def(
            "new_state", [](PySession& s) { return s.session->new_state(); },
            nb::call_guard<nb::gil_scoped_release>())
        .def(
            "fork", [](PySession& s, const State& state) { return s.session->fork(state); }, "state"_a,
            nb::call_guard<nb::gil_scoped_release>(),
            "A copy that shares memory until one of the two is extended.")
        .def(
            "extend",
            [](PySession& s, State& state, const Tokens& tokens, const nb::object& progress,
               const nb::object& interrupt, const std::vector<int64_t>& checkpoints, int64_t end) {
                const Call call(s);
                const Progress report = progress_of(progress, s.ending);
                const Interrupt check = interrupt_of(interrupt, s.ending);
                nb::gil_scoped_release no_gil;
                return s.session->extend(state, span_of(tokens), report, check, {checkpoints, end});
            },
            "state"_a, "tokens"_a, "progress"_a = nb::none(), "interrupt"_a = nb::none(),
            "checkpoints"_a = std::vector<int64_t>(), "end"_a = 0,
            "Take tokens in; the state then holds the last one's logits. Returns the states at the positions "
            "that checkpoints names. end: where the prompt ends, if these are not its last tokens; then "
            "there "
            "are no logits. progress is called between chunks, interrupt every 50 ms or so; what they raise "
            "ends the work.",
            nb::sig(
                "def extend(self, state: State, tokens: numpy.typing.NDArray[numpy.int32], " LILY_CALLBACKS
                ", checkpoints: collections.abc.Sequence[int] = (), end: int = 0) -> list[State]"))
        .def_prop_ro(
            "grid", [](PySession& s) { return s.session->grid(); },
            "A prompt cut at multiples of it gets the bits of the prompt in one piece.")
        .def(
            "resumes",
            [](PySession& s, int64_t position, int64_t end) { return s.session->resumes(position, end); },
            "position"_a, "end"_a,
            "Whether a prompt of `end` tokens that goes on from a checkpoint gets the bits that it has in "
            "one "
            "piece.")
        .def_prop_ro(
            "state_order", [](PySession& s) { return s.session->ops().state_order(); },
            "Names how states are laid out; those of another order can't be restored.")
        .def_prop_ro(
            "state_sizes", [](PySession& s) { return s.session->sizes(); },
            "Bytes of a page of 256 positions, of a copy of the recurrent states, and of logits.")
        .def_prop_ro(
            "state_bytes", [](PySession& s) { return s.session->ledger().live(); },
            "Bytes of all its states that are alive, without what lies in mapped files.")
        .def_prop_ro(
            "state_peak", [](PySession& s) { return s.session->ledger().peak(); },
            "The most that state_bytes has been since reset_state_peak().")
        .def("reset_state_peak", [](PySession& s) { s.session->ledger().reset_peak(); })
        .def_prop_rw(
            "state_limit", [](PySession& s) { return s.session->ledger().limit(); },
            [](PySession& s, int64_t bytes) { s.session->ledger().set_limit(bytes); },
            "The most that state_bytes may be, or 0: what would need more raises MemoryLimitError.")
        .def("parts", &parts_of, "state"_a,
             "A state's memory as bytes that no other state writes: pages, recurrent states, logits or None.",
             nb::sig("def parts(self, state: State) -> tuple[list[numpy.typing.NDArray[numpy.uint8]], "
                     "numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.uint8] | None]"))
        .def("restore", &restore, "file"_a, "nbytes"_a, "pages"_a, "states"_a,
             "Map a file by its descriptor and return the states that lie in it: pages from a byte on; for "
             "each "
             "state its length, and the bytes where its recurrent states and logits begin, -1 for none.",
             nb::sig("def restore(self, file: int, nbytes: int, pages: int, states: "
                     "collections.abc.Sequence[tuple[int, int, int]]) -> list[State]"))
        .def(
            "sample",
            [](PySession& s, State& state, const Sampling& sampling, const History* history,
               const std::optional<Mask>& allowed) {
                const Call call(s);
                nb::gil_scoped_release no_gil;
                return s.session->sample(state, sampling, history ? *history : History(), span_of(allowed));
            },
            "state"_a, "sampling"_a, "history"_a = nb::none(), "allowed"_a = nb::none(),
            "Draw the token that follows. allowed: a bit for each token, bit i % 32 of word i / 32 for token "
            "i.",
            nb::sig("def sample(self, state: State, sampling: Sampling, history: History | None = "
                    "None, " LILY_ALLOWED ") -> int"))
        .def(
            "step",
            [](PySession& s, State& state, int32_t token, const Sampling& sampling, History& history,
               const std::optional<Mask>& allowed) {
                const Call call(s);
                nb::gil_scoped_release no_gil;
                return s.session->step(state, token, sampling, history, span_of(allowed));
            },
            "state"_a, "token"_a, "sampling"_a, "history"_a, "allowed"_a = nb::none(),
            "Take a drawn token in, and into the history, and draw the next.",
            nb::sig(
                "def step(self, state: State, token: int, sampling: Sampling, history: History, " LILY_ALLOWED
                ") -> int"))
        .def(
            "step_with",
            [](PySession& s, State& state, int32_t token, const Tokens& guess, const Sampling& sampling,
               History& history) {
                const Call call(s);
                nb::gil_scoped_release no_gil;
                return s.session->step_with(state, token, span_of(guess), sampling, history);
            },
            "state"_a, "token"_a, "guess"_a, "sampling"_a, "history"_a,
            "Take in a drawn token and a guess of what follows it in one pass; return the tokens that as "
            "many "
            "steps would have drawn, as far as the guess was right, and one more.",
            nb::sig("def step_with(self, state: State, token: int, guess: numpy.typing.NDArray[numpy.int32], "
                    "sampling: Sampling, history: History) -> list[int]"))
        .def(
            "logprobs",
            [](const PySession& s, const State& state, int32_t token, int top) {
                std::vector<TokenLogprob> found;
                {
                    nb::gil_scoped_release no_gil;
                    found = s.session->logprobs(state, token, top);
                }
                std::vector<std::pair<int32_t, double>> pairs;
                for (const auto& [id, logprob] : found) pairs.emplace_back(id, logprob);
                return pairs;
            },
            "state"_a, "token"_a, "top"_a,
            "(token, logprob) of a token that could follow, then of the `top` likeliest: the log-softmax of "
            "the "
            "last token's logits as they are.")
        .def(
            "logits",
            [](PySession& s, State& state, const Tokens& tokens, const nb::object& progress,
               const nb::object& interrupt) {
                const Call call(s);
                const Progress report = progress_of(progress, s.ending);
                const Interrupt check = interrupt_of(interrupt, s.ending);
                FloatArray out = new_array({tokens.shape(0), static_cast<size_t>(s.weights->config.vocab)});
                nb::gil_scoped_release no_gil;
                s.session->logits(state, span_of(tokens), out.data(), report, check);
                return out;
            },
            "state"_a, "tokens"_a, "progress"_a = nb::none(), "interrupt"_a = nb::none(),
            "Take tokens in; returns (T, V) float32, every row's logits.",
            nb::sig(
                "def logits(self, state: State, tokens: numpy.typing.NDArray[numpy.int32], " LILY_CALLBACKS
                ") -> numpy.typing.NDArray[numpy.float32]"))
        .def(
            "last_logits",
            [](PySession& s, const State& state) {
                s.session->check_own(state);
                if (!state.has_logits()) throw std::invalid_argument("the state holds no token's logits");
                const auto vocab = static_cast<size_t>(s.weights->config.vocab);
                FloatArray out = new_array({vocab});
                std::vector<float> room;
                std::ranges::copy(s.session->host_logits(state, room), out.data());
                return out;
            },
            "state"_a, "The last token's logits, (V,) float32.")
        .def("layer_state", &layer_state, "state"_a, "layer"_a,
             "A layer's state in float32: keys and values (G, T, Dh), or conv (C - 1, channels) and S (Hv, "
             "Dv, Dk).",
             nb::sig("def layer_state(self, state: State, layer: int) -> "
                     "tuple[numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32]]"))
        .def(
            "_sample_from",
            [](PySession& s, const Floats& logits, const Sampling& sampling, int64_t position,
               const History* history, const std::optional<Mask>& allowed) {
                const Draw draw{position, history ? history->counts() : std::span<const TokenCount>(),
                                span_of(allowed)};
                Ops& ops = s.session->ops();
                const size_t bytes = logits.size() * sizeof(float);
                const Memory memory = ops.allocate(bytes);
                ops.copy(memory.get(), reinterpret_cast<const std::byte*>(logits.data()), bytes);
                ops.sample({reinterpret_cast<const float*>(memory.get()), logits.size()}, sampling, draw);
                return ops.drawn();
            },
            "logits"_a, "sampling"_a, "position"_a, "history"_a = nb::none(), "allowed"_a = nb::none())
        .def_prop_ro(
            "_step_counts", [](PySession& s) { return s.session->turns().counts(); },
            "Decode steps run, and the passes that they were run in.")
        .def(
            "end", [](PySession& s) { s.ending = true; },
            "Let calls under way end their threads at their next chance.")
        .def_prop_ro("calls", [](PySession& s) { return s.calls.load(); })
        .def("_finish", [](PySession& s) { s.session->ops().finish(); })
        .def(
            "_drop_barrier", [](PySession& s, int64_t number) { s.session->ops().drop_barrier(number); },
            "number"_a, "Let the simulator take no notice of the number-th barrier from here, for tests.")
        .def(
            "_compile", [](PySession& s) { return s.session->ops().compile(); },
            "Compile every kernel; what is wrong with any, a line each.")
        .def(
            "_device_seconds", [](PySession& s) { return s.session->ops().device_seconds(); },
            "Seconds that the device worked since the last call; 0 where it does not say.")
        .def(
            "_recorded", [](PySession& s) { return s.session->ops().recorded(); },
            "The dispatches since the last call, as an instrumented simulator saw them; the first call "
            "begins.")
        .def("_run", &run_op, "op"_a, "layer"_a, "parts"_a,
             "Run one op over [(state, tokens), ...], for tests.")
        .def(
            "_time", &time_ops, "ops"_a, "times"_a, "parts"_a,
            "Seconds of each of [(op, layer), ...], run `times` times on one batch, for benchmarks; the last "
            "one's include the wait for a device.")
        .def(
            "_use_kernels", [](PySession& s, const std::string& file) { s.session->ops().use_kernels(file); },
            "file"_a, "Take a CPU's kernels of a row or few from a file, for benchmarks.")
        .def_prop_ro(
            "_stages", [](PySession& s) { return s.session->ops().stages(); },
            "How often the CPU's threads were called together so far; 0 on a GPU.")
        .def(
            "_advance", [](PySession&, State& state, int64_t tokens) { state.advance(tokens); }, "state"_a,
            "tokens"_a)
        .def("_set", &set_activation, "name"_a, "rows"_a)
        .def("_get", &get_activation, "name"_a, "rows"_a);

    m.def("metal_facts", &metal_facts, "kernels"_a = "",
          "What is known of this machine's GPU as Metal sees it, a line each; empty without Metal.");
    m.def(
        "record_decode",
        [](const std::filesystem::path& directory, int64_t position,
           const std::map<std::string, std::string>& given) {
            const Options options = options_of(given);
            const Config config = read_config(directory.string());
            if (position < 0 || position >= config.max_positions)
                throw std::invalid_argument(format("position: wanted 0 to %lld, got %lld",
                                                   static_cast<long long>(config.max_positions - 1),
                                                   static_cast<long long>(position)));
            return record_decode(config, options, position);
        },
        "directory"_a, "position"_a, "options"_a,
        "The dispatches of the decode step at a position, for a folder's config.json: recorded dry.",
        nb::sig("def record_decode(directory: str | os.PathLike[str], position: int, "
                "options: collections.abc.Mapping[str, str]) -> list[Dispatch]"));
    m.def(
        "read_config",
        [](const std::filesystem::path& directory) { return config_dict(read_config(directory.string())); },
        "directory"_a, "The model's dimensions in a folder's config.json.",
        nb::sig("def read_config(directory: str | os.PathLike[str]) -> dict[str, typing.Any]"));
    m.def(
        "_scratch_of_prefill",
        [](const std::filesystem::path& directory, int64_t tokens,
           const std::map<std::string, std::string>& given) {
            return scratch_of_prefill(read_config(directory.string()), options_of(given), tokens);
        },
        "directory"_a, "tokens"_a, "options"_a,
        nb::sig("def _scratch_of_prefill(directory: str | os.PathLike[str], tokens: int, "
                "options: collections.abc.Mapping[str, str]) -> int"));
    m.def(
        "option_list",
        [] {
            std::vector<std::tuple<std::string, std::string, std::string, std::string>> list;
            for (const OptionInfo& o : option_list()) list.emplace_back(o.name, o.type, o.standard, o.text);
            return list;
        },
        "Every option: name, type, default, what it does.");
    m.def("option_alternatives", &option_alternatives,
          "The values that each option's default is measured against; none for one that is no technique.");
}

}  // namespace
}  // namespace lily

NB_MODULE(_core, m) {
    nb::register_exception_translator(lily::translate, nullptr);
    lily::bind_weights(m);
    lily::bind_sampling(m);
    lily::bind_traffic(m);
    lily::bind_session(m);
}
