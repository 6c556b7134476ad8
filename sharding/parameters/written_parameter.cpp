#include "sharding/parameters/written_parameter.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "sharding/comm/digest.h"

namespace zeropg {

at::Tensor bits_of(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1:
      return tensor.view(at::kByte);
    case 2:
      return tensor.view(at::kShort);
    case 4:
      return tensor.view(at::kInt);
    case 8:
      return tensor.view(at::kLong);
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "[zeropg] writes to parameters of ", tensor.scalar_type(),
                                  " cannot be merged; write them inside full_parameters(model, writable=True).");
  }
}

at::Tensor WrittenParameter::home() const { return flat->whole().narrow(0, place().offset, place().numel); }

WatchedStorage::Target WrittenParameter::home_target() const { return target_in(flat->whole(), place().offset); }

at::Tensor WrittenParameter::tensor_of(const c10::Storage& storage) const {
  return at::empty({0}, at::dtype(flat->dtype()).device(flat->device())).set_(storage, 0, {place().numel});
}

at::Tensor WrittenParameter::settled_values() const { return settled ? tensor_of(settled) : at::Tensor(); }

int64_t WrittenParameter::digest_of_news() const {
  if (flat->is_attached()) {  // the whole content, which a rank that wrote nothing can compare
    return static_cast<int64_t>(digest_of(home(), 0));
  }
  return positions.defined() ? static_cast<int64_t>(digest_of(values, digest_of(positions, 1))) : 0;
}

void WrittenParameter::find_changes(const at::Tensor& after, const at::Tensor& before) {
  positions = bits_of(after).ne(bits_of(before)).nonzero().squeeze(1);
  if (positions.numel() == 0) {
    forget_changes();
  } else {
    values = bits_of(after).index_select(0, positions).view(after.scalar_type());
  }
}

void WrittenParameter::forget_changes() {
  positions.reset();
  values.reset();
}

}  // namespace zeropg
