// The layout is a pure function: which tensor, which file, which offset.
#include "sharding/checkpoint/layout.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace zeropg {
namespace {

using c10::ScalarType;

std::vector<TensorSpec> bytes_of(std::vector<int64_t> sizes) {
  std::vector<TensorSpec> tensors;
  for (const int64_t size : sizes)
    tensors.push_back({std::string(1, 't').append(std::to_string(tensors.size())), {size}, ScalarType::Byte});
  return tensors;
}

std::vector<int32_t> files_of(std::vector<int64_t> sizes, uint64_t limit) {
  std::vector<int32_t> files;
  for (const TensorPlace& place : plan_layout(bytes_of(std::move(sizes)), limit, "model", {}).places)
    files.push_back(place.file);
  return files;
}

TEST(Layout, files_are_filled_by_the_rule_of_hugging_face) {
  // The example in huggingface_hub's documentation.
  EXPECT_EQ(files_of({6, 6, 2, 6, 2, 2}, 10), (std::vector<int32_t>{0, 1, 1, 2, 2, 2}));
  // A tensor beyond the limit gets its own file, before the file that was being filled.
  EXPECT_EQ(files_of({2, 11, 3}, 10), (std::vector<int32_t>{1, 0, 1}));
  EXPECT_EQ(files_of({10, 0, 10}, 10), (std::vector<int32_t>{0, 0, 1}));
}

TEST(Layout, one_file_has_the_plain_name) {
  EXPECT_EQ(plan_layout(bytes_of({1, 2}), 10, "model", {}).files[0].name, "model.safetensors");
  const Layout layout = plan_layout(bytes_of({6, 6, 6}), 10, "model", {});
  ASSERT_EQ(layout.files.size(), 3u);
  EXPECT_EQ(layout.files[2].name, "model-00003-of-00003.safetensors");
  EXPECT_EQ(layout.tensor_bytes, 18u);
}

TEST(Layout, a_model_without_tensors_makes_one_empty_file) {
  const Layout layout = plan_layout({}, 10, "model", {});
  ASSERT_EQ(layout.files.size(), 1u);
  EXPECT_EQ(layout.files[0].bytes, layout.files[0].header.size());
}

TEST(Layout, places_agree_with_the_headers_and_keep_elements_aligned) {
  const std::vector<TensorSpec> tensors = {{"flag", {3}, ScalarType::Bool},
                                           {"weight", {3, 5}, ScalarType::BFloat16},
                                           {"count", {}, ScalarType::Long},
                                           {"none", {0, 7}, ScalarType::Float},
                                           {"bias", {5}, ScalarType::BFloat16}};
  for (const uint64_t limit : {8u, 20u, 40u, 1000u}) {
    const Layout layout = plan_layout(tensors, limit, "model", {{"format", "pt"}});
    size_t found = 0;
    for (size_t file = 0; file < layout.files.size(); ++file) {
      const FileLayout& planned = layout.files[file];
      const safetensors::Header header = safetensors::parse_header(
          {reinterpret_cast<const std::byte*>(planned.header.data()), planned.header.size()}, planned.bytes);
      for (const safetensors::TensorEntry& entry : header.tensors) {
        for (size_t index = 0; index < tensors.size(); ++index) {
          if (tensors[index].name != entry.name) continue;
          ++found;
          EXPECT_EQ(layout.places[index].file, static_cast<int32_t>(file));
          EXPECT_EQ(layout.places[index].offset, header.data_offset + entry.begin);
          EXPECT_EQ(layout.places[index].offset % c10::elementSize(entry.dtype), 0u);
        }
      }
    }
    EXPECT_EQ(found, tensors.size());
  }
}

TEST(Layout, nonsense_is_refused) {
  EXPECT_THROW(plan_layout(bytes_of({1}), 0, "model", {}), c10::ValueError);
  const std::vector<TensorSpec> twice = {{"a", {1}, ScalarType::Byte}, {"a", {1}, ScalarType::Byte}};
  EXPECT_THROW(plan_layout(twice, 10, "model", {}), c10::ValueError);
}

}  // namespace
}  // namespace zeropg
