// Python's view of compression/: codecs, residuals, and the reductions that use them. python/zeropg/compression.py is
// what users see.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/process_group/process_group.h"
#include "compression/codec_meter.h"
#include "compression/error_feedback.h"
#include "compression/registry/registry.h"
#include "python/bindings/bindings.h"
#include "python/bindings/bound_codec.h"
#include "python/bindings/release_gil.h"

namespace py = pybind11;

namespace zeropg {
namespace {

using Residuals = std::shared_ptr<ResidualStore>;
using Meter = std::shared_ptr<CodecMeter>;
using PyRange = std::tuple<std::string, int64_t, int64_t>;  // name, start, numel

void check_floats(const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat && tensor.device().is_cpu() && tensor.is_contiguous(),
                   "[zeropg] compression: got a tensor of ", tensor.scalar_type(), " on ", tensor.device(),
                   ", expected a contiguous float32 tensor on the cpu");
}

std::span<const float> values_of(const at::Tensor& tensor) {
  check_floats(tensor);
  return {tensor.const_data_ptr<float>(), static_cast<size_t>(tensor.numel())};
}

std::span<float> mutable_values_of(const at::Tensor& tensor) {
  check_floats(tensor);
  return {tensor.mutable_data_ptr<float>(), static_cast<size_t>(tensor.numel())};
}

// `out` is room for an encoding that the caller keeps; without one the result has its own memory.
at::Tensor encode(const BoundCodec& self, const at::Tensor& values, const std::optional<at::Tensor>& residual,
                  const std::optional<at::Tensor>& out) {
  const auto numbers = values_of(values);
  TORCH_CHECK_VALUE(!residual || residual->numel() == values.numel(),
                    "[zeropg] compression: the residual has another size than the values");
  const int64_t capacity = self.codec->capacity_bytes(values.numel());
  TORCH_CHECK_VALUE(!out || (out->scalar_type() == at::kByte && out->is_contiguous() && out->numel() == capacity),
                    "[zeropg] compression: `out` is no contiguous uint8 tensor of ", capacity, " bytes");
  const at::Tensor encoded = out ? *out : at::empty({capacity}, at::kByte);
  const int64_t length = self.codec->encode(numbers, residual ? mutable_values_of(*residual) : std::span<float>(),
                                            {static_cast<std::byte*>(encoded.mutable_data_ptr()), encoded.nbytes()});
  const at::Tensor used = encoded.narrow(0, 0, length);
  return out ? used : used.clone();
}

std::span<const std::byte> encoding_of(const BoundCodec& self, const at::Tensor& encoded, int64_t numel) {
  TORCH_CHECK_TYPE(encoded.scalar_type() == at::kByte && encoded.is_contiguous(),
                   "[zeropg] compression: expected the contiguous bytes that encode() made");
  const int64_t capacity = numel < 0 ? -1 : self.codec->capacity_bytes(numel);
  const bool fits = self.codec->has_fixed_size() ? encoded.numel() == capacity : encoded.numel() <= capacity;
  TORCH_CHECK_VALUE(fits, "[zeropg] compression: got ", encoded.numel(), " bytes, expected ",
                    self.codec->has_fixed_size() ? "" : "at most ", capacity, " for ", numel, " values");
  return {static_cast<const std::byte*>(encoded.const_data_ptr()), encoded.nbytes()};
}

at::Tensor decode(const BoundCodec& self, const at::Tensor& encoded, int64_t numel) {
  const auto bytes = encoding_of(self, encoded, numel);
  const at::Tensor values = at::empty({numel}, at::kFloat);
  self.codec->decode(bytes, mutable_values_of(values));
  return values;
}

void decode_add(const BoundCodec& self, const at::Tensor& encoded, const at::Tensor& values) {
  self.codec->decode_add(encoding_of(self, encoded, values.numel()), mutable_values_of(values));
}

py::dict as_dict(const CodecCounters& counters) {
  return py::dict(py::arg("calls") = counters.calls, py::arg("plain_bytes") = counters.plain_bytes,
                  py::arg("encoded_bytes") = counters.encoded_bytes,
                  py::arg("encode_seconds") = counters.encode_seconds,
                  py::arg("decode_seconds") = counters.decode_seconds, py::arg("wire_seconds") = counters.wire_seconds);
}

// [(name, hop, start, tensor)]; the tensors are the residuals themselves.
py::list as_list(const std::vector<ResidualSegment>& segments) {
  py::list result;
  for (const ResidualSegment& segment : segments) {
    const at::Tensor view = at::from_blob(
        segment.values->data(), {static_cast<int64_t>(segment.values->size())}, [held = segment.values](void*) {},
        at::TensorOptions().dtype(at::kFloat));
    result.append(py::make_tuple(segment.name, segment.hop, segment.start, view));
  }
  return result;
}

ProcessGroupZero& zeropg_of(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto* group = dynamic_cast<ProcessGroupZero*>(backend.get());
  TORCH_CHECK_TYPE(group != nullptr, "[zeropg] compression: the process group's backend is ", backend->getBackendName(),
                   ", expected zeropg: only its collectives carry codecs");
  return *group;
}

Compression make_compression(const BoundCodec& codec, const Residuals& residuals, const std::vector<PyRange>& ranges,
                             const Meter& meter) {
  Compression compression{.codec = codec.codec, .residuals = residuals, .ranges = {}, .meter = meter};
  for (const auto& [name, start, numel] : ranges) compression.ranges.push_back({name, start, numel});
  return compression;
}

}  // namespace

void bind_compression(py::module_& m) {
  m.def(
      "compressors",
      [] {
        py::list result;
        for (const CompressorDescription& each : compressors()) {
          result.append(py::make_tuple(each.name, each.help, each.parameters));
        }
        return result;
      },
      "[(name, help, [(parameter, default)])]: what is registered.");

  py::class_<BoundCodec>(m, "Compressor", "A codec of compression/registry/registry.h with its parameters.")
      .def(py::init([](const std::string& name, const CompressorParameters& parameters) {
             return BoundCodec{make_compressor(name, parameters)};
           }),
           py::arg("name"), py::arg("parameters"))
      .def_property_readonly("description", [](const BoundCodec& self) { return self.codec->description(); })
      .def(
          "typical_bytes", [](const BoundCodec& self, int64_t count) { return self.codec->typical_bytes(count); },
          py::arg("count"), "What an encoding of `count` gradients takes as a rule.")
      .def(
          "capacity_bytes", [](const BoundCodec& self, int64_t count) { return self.codec->capacity_bytes(count); },
          py::arg("count"), "The most that an encoding of `count` values takes.")
      .def(
          "encode", &encode, py::arg("values"), py::arg("residual") = py::none(), py::arg("out") = py::none(),
          "The uint8 encoding of a float32 tensor, in `out` (capacity_bytes long) where that is given; the residual is "
          "added before and updated in place.")
      .def("decode_add", &decode_add, py::arg("encoded"), py::arg("values"), "Adds what was encoded to `values`.")
      .def("decode", &decode, py::arg("encoded"), py::arg("numel"));

  py::class_<CodecMeter, std::shared_ptr<CodecMeter>>(m, "CodecMeter", "What the encoded calls of one model count.")
      .def(py::init<>())
      .def(
          "counters", [](const CodecMeter& self) { return as_dict(self.counters()); },
          "Sums so far: {calls, plain_bytes, encoded_bytes, encode_seconds, decode_seconds, wire_seconds}.");

  py::class_<ResidualStore, Residuals>(m, "ResidualStore", "Residuals of one model on one rank (error feedback).")
      .def(py::init<>())
      .def(
          "segments", [](const Residuals& self) { return as_list(self->segments()); },
          "[(name, hop, start, tensor)]: elements [start, start + len) of `name`; live, for between steps.")
      .def(
          "load",
          [](ResidualStore& self, const std::string& name, int32_t hop, int64_t start, const at::Tensor& values) {
            TORCH_CHECK_VALUE(start >= 0 && hop >= 0, "[zeropg] residuals of '", name, "': start ", start, ", hop ",
                              hop, "; expected neither below 0");
            self.load(name, hop, start, values_of(values));
          },
          py::arg("name"), py::arg("hop"), py::arg("start"), py::arg("values"))
      .def(
          "owe",
          [](ResidualStore& self, const std::string& name, int64_t start, const at::Tensor& values) {
            TORCH_CHECK_VALUE(start >= 0, "[zeropg] residuals of '", name, "': start ", start, ", expected 0 or more");
            self.owe(name, start, values_of(values));
          },
          py::arg("name"), py::arg("start"), py::arg("values"),
          "Adds values, in units of this rank's contribution, to what is still to be paid without being encoded.")
      .def(
          "take",
          [](ResidualStore& self, const std::string& name, int32_t hop) { return as_list(self.take(name, hop)); },
          py::arg("name"), py::arg("hop"), "Removes them; [(name, hop, start, tensor)].")
      .def("scale", &ResidualStore::scale, py::arg("factor"))
      .def("clear", &ResidualStore::clear)
      .def_property_readonly("has_arrears", &ResidualStore::has_arrears,
                             "Whether anything is to be paid without being encoded.")
      .def_property_readonly("bytes", &ResidualStore::bytes);

  m.def(
      "coding", [](const c10::intrusive_ptr<c10d::Backend>& backend) { return as_dict(zeropg_of(backend).coding()); },
      py::arg("backend"), "What the encoded calls of a group without a CodecMeter have counted, as its counters().");
  m.def(
      "compressed_all_reduce",
      [](const c10::intrusive_ptr<c10d::Backend>& backend, const at::Tensor& tensor, const BoundCodec& codec,
         const Residuals& residuals, const std::vector<PyRange>& ranges, const c10d::ReduceOp& op, bool async_op,
         const Meter& meter) {
        return zeropg_of(backend).compressed_all_reduce(tensor, make_compression(codec, residuals, ranges, meter), op,
                                                        async_op);
      },
      py::arg("backend"), py::arg("tensor"), py::arg("codec"), py::arg("residuals"), py::arg("ranges"), py::arg("op"),
      py::arg("async_op"), py::arg("meter") = py::none(), ReleaseGil());
  m.def(
      "compressed_reduce_scatter",
      [](const c10::intrusive_ptr<c10d::Backend>& backend, const at::Tensor& output, const at::Tensor& input,
         const BoundCodec& codec, const Residuals& residuals, const std::vector<PyRange>& ranges,
         const c10d::ReduceOp& op, bool async_op, const Meter& meter) {
        return zeropg_of(backend).compressed_reduce_scatter(
            output, input, make_compression(codec, residuals, ranges, meter), op, async_op);
      },
      py::arg("backend"), py::arg("output"), py::arg("input"), py::arg("codec"), py::arg("residuals"),
      py::arg("ranges"), py::arg("op"), py::arg("async_op"), py::arg("meter") = py::none(), ReleaseGil());
  m.def(
      "compressed_all_gather",
      [](const c10::intrusive_ptr<c10d::Backend>& backend, const at::Tensor& output, const at::Tensor& input,
         const BoundCodec& codec, bool async_op) {
        return zeropg_of(backend).compressed_all_gather(output, input, {.codec = codec.codec}, async_op);
      },
      py::arg("backend"), py::arg("output"), py::arg("input"), py::arg("codec"), py::arg("async_op"), ReleaseGil());
}

}  // namespace zeropg
