// Python's view of compression/weights: frozen weights in 4 or 8 bits. python/zeropg/quantization is what users see.
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <span>
#include <string>

#include "compression/weights/packed_weight.h"
#include "python/bindings/bindings.h"
#include "python/bindings/release_gil.h"
#include "sharding/optim/elementwise.h"

namespace py = pybind11;

namespace zeropg {
namespace {

std::span<const std::byte> bytes_of(const at::Tensor& packed) {
  TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte && packed.device().is_cpu() && packed.is_contiguous(),
                   "[zeropg] packed weight: got a tensor of ", packed.scalar_type(), " on ", packed.device(),
                   ", expected contiguous uint8 on the cpu");
  return {static_cast<const std::byte*>(packed.const_data_ptr()), packed.nbytes()};
}

at::Tensor pack(const at::Tensor& values, const std::string& format, int64_t block) {
  TORCH_CHECK_TYPE(values.scalar_type() == at::kFloat && values.device().is_cpu() && values.is_contiguous(),
                   "[zeropg] packed weight: got a tensor of ", values.scalar_type(), " on ", values.device(),
                   ", expected contiguous float32 on the cpu");
  TORCH_CHECK_VALUE(values.dim() == 2, "[zeropg] packed weight: got ", values.dim(), " dimensions, expected a matrix");
  const PackedWeightShape shape = {weight_format_of(format), block, values.size(0), values.size(1)};
  const at::Tensor packed = at::empty({packed_weight_bytes(shape)}, at::kByte);
  pack_weight(shape, {values.const_data_ptr<float>(), static_cast<size_t>(values.numel())},
              {static_cast<std::byte*>(packed.mutable_data_ptr()), packed.nbytes()});
  return packed;
}

WeightType weight_type_of(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
                   "[zeropg] packed weight: dtype is ", dtype, ", expected float32, bfloat16 or float16");
  return dtype == at::kFloat      ? WeightType::kFloat32
         : dtype == at::kBFloat16 ? WeightType::kBfloat16
                                  : WeightType::kFloat16;
}

at::Tensor unpack(const at::Tensor& packed, at::ScalarType dtype) {
  const std::span<const std::byte> bytes = bytes_of(packed);
  const WeightType type = weight_type_of(dtype);
  const PackedWeightShape shape = shape_of_packed(bytes);
  const at::Tensor values = at::empty({shape.rows, shape.columns}, dtype);
  auto* out = static_cast<std::byte*>(values.mutable_data_ptr());
  const auto up_to_block = [&](int64_t place) {
    return std::min((place + shape.block - 1) / shape.block * shape.block, shape.numel());
  };
  parallel_over_ranges(shape.numel(), [&](int64_t begin, int64_t end) {
    const int64_t start = up_to_block(begin);
    unpack_weight(shape, bytes, start, up_to_block(end), type, out + start * values.element_size());
  });
  return values;
}

}  // namespace

void bind_weights(py::module_& m) {
  m.def("pack_weight", &pack, py::arg("values"), py::arg("format"), py::arg("block"), ReleaseGil(),
        "The uint8 bytes of a float32 matrix in \"nf4\", \"int4\" or \"int8\"; see compression/README.md.");
  m.def("unpack_weight", &unpack, py::arg("packed"), py::arg("dtype"), ReleaseGil(),
        "The matrix that pack_weight packed, in float32, bfloat16 or float16.");
}

}  // namespace zeropg
