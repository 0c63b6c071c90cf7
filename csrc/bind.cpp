// The Python module lily._core. The only file that knows nanobind.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <memory>

#include "error.h"
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
             nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("config", [](const SharedWeights& self) { return config_dict(self.weights->config); })
        .def_prop_ro("bytes", [](const SharedWeights& self) { return self.weights->bytes; })
        .def_prop_ro("tensors", [](const SharedWeights& self) { return self.weights->tensors; })
        .def_prop_ro("skipped", [](const SharedWeights& self) { return self.weights->skipped; })
        .def_prop_ro("warnings", [](const SharedWeights& self) { return self.weights->warnings; })
        .def_prop_ro("fingerprint", [](const SharedWeights& self) { return self.weights->fingerprint; })
        .def("tensor_table", &tensor_table,
             "Name, type and shape of every bound tensor, under the core's names.")
        .def("tensor_bytes", &tensor_bytes, "name"_a, "A copy of one bound tensor's bytes.");
}

}  // namespace
}  // namespace lily

NB_MODULE(_core, m) {
    nb::register_exception_translator(lily::translate, nullptr);
    lily::bind_weights(m);
}
