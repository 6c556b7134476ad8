// What a torch without hooks for it cannot record: the group's last operations.
#include "backend/process_group/process_group.h"

namespace zeropg {

namespace {

constexpr int64_t kRecorderHook = -1;  // torch's own are 0 or more

// A list of equal tensors counts as one with a first dimension more, as what it is gathered into.
void describe(const std::vector<at::Tensor>& tensors, bool is_list, std::vector<std::vector<int64_t>>& sizes,
              std::vector<std::string>& dtypes) {
  for (const at::Tensor& tensor : tensors) {
    sizes.push_back(tensor.sizes().vec());
    dtypes.emplace_back(c10::toString(tensor.scalar_type()));
    if (is_list) {
      sizes.back().insert(sizes.back().begin(), static_cast<int64_t>(tensors.size()));
      return;
    }
  }
}

}  // namespace

void ProcessGroupZero::start_recording() {
  auto recorder = std::make_shared<FlightRecorder>();
  hooks_->set_completion(kRecorderHook, [recorder](uint64_t completion_key, float duration_ms) {
    recorder->complete(completion_key, duration_ms);
  });
  recorder_ = std::move(recorder);
}

std::vector<RecordedOperation> ProcessGroupZero::recorded_operations() const {
  return recorder_ ? recorder_->operations() : std::vector<RecordedOperation>();
}

void ProcessGroupZero::record_collective(const std::vector<CollectiveArgs>& requests, const ZeroWork& work) {
  RecordedOperation operation{.completion_key = work.completion_key(),
                              .name = work.label().name(),
                              .sequence = work.label().sequence,
                              .timeout_ms = work.timeout().count()};
  for (const CollectiveArgs& request : requests) {
    describe(request.inputs, request.input_is_list, operation.input_sizes, operation.input_dtypes);
    describe(request.outputs, request.output_is_list, operation.output_sizes, operation.output_dtypes);
  }
  recorder_->record(std::move(operation));
}

void ProcessGroupZero::record_message(const at::Tensor& data, const ZeroWork& work) {
  const MessageRoute& route = *work.label().route;
  RecordedOperation operation{.completion_key = work.completion_key(),
                              .is_message = true,
                              .sequence = work.label().sequence,
                              .timeout_ms = work.timeout().count()};
  operation.name = c10::str(route.is_send ? "send " : "recv ", rank_, route.is_send ? "->" : "<-", route.peer);
  auto& sizes = route.is_send ? operation.input_sizes : operation.output_sizes;
  describe({data}, /*is_list=*/false, sizes, route.is_send ? operation.input_dtypes : operation.output_dtypes);
  recorder_->record(std::move(operation));
}

}  // namespace zeropg
