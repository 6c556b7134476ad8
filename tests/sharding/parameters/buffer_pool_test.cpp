// Memory goes round instead of being allocated again.
#include "sharding/parameters/buffer_pool.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace zeropg {
namespace {

TEST(BufferPool, GivesTheSameMemoryAgainInAnyDtype) {
  BufferPool pool;
  at::Tensor first = pool.acquire(100, at::kFloat, at::kCPU);
  EXPECT_EQ(first.numel(), 100);
  const void* address = first.const_data_ptr();
  pool.release(std::move(first));
  const at::Tensor second = pool.acquire(200, at::kBFloat16, at::kCPU);
  EXPECT_EQ(second.const_data_ptr(), address);
  EXPECT_EQ(second.scalar_type(), at::kBFloat16);
  EXPECT_EQ(pool.allocated_bytes(), 400);
}

TEST(BufferPool, MakesNewBuffersAsItIsTold) {
  std::vector<int64_t> asked;
  BufferPool pool([&](int64_t bytes, c10::Device device) {
    asked.push_back(bytes);
    return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  });
  pool.release(pool.acquire(100, at::kFloat, at::kCPU));
  pool.release(pool.acquire(50, at::kFloat, at::kCPU));
  EXPECT_EQ(asked, std::vector<int64_t>{400});
}

TEST(BufferPool, NeverGivesOneBufferTwice) {
  BufferPool pool;
  const at::Tensor a = pool.acquire(10, at::kDouble, at::kCPU);
  const at::Tensor b = pool.acquire(10, at::kDouble, at::kCPU);
  EXPECT_FALSE(a.is_alias_of(b));
  EXPECT_EQ(pool.allocated_bytes(), 160);
}

TEST(BufferPool, TakesTheSmallestThatFitsAndReturnsAllOfIt) {
  BufferPool pool;
  at::Tensor large = pool.acquire(1000, at::kByte, at::kCPU);
  at::Tensor small = pool.acquire(10, at::kByte, at::kCPU);
  const void* large_address = large.const_data_ptr();
  const void* small_address = small.const_data_ptr();
  pool.release(std::move(large));
  pool.release(std::move(small));
  at::Tensor fits = pool.acquire(8, at::kByte, at::kCPU);
  EXPECT_EQ(fits.const_data_ptr(), small_address);
  pool.release(std::move(fits));
  at::Tensor part = pool.acquire(11, at::kByte, at::kCPU);
  EXPECT_EQ(part.const_data_ptr(), large_address);
  pool.release(std::move(part));  // the part stands for the whole
  EXPECT_EQ(pool.acquire(1000, at::kByte, at::kCPU).const_data_ptr(), large_address);
  EXPECT_EQ(pool.allocated_bytes(), 1010);
}

TEST(BufferPool, ForgetsAllOfABuffer) {
  BufferPool pool;
  const at::Tensor kept = pool.acquire(7, at::kByte, at::kCPU);
  pool.release(pool.acquire(100, at::kFloat, at::kCPU));
  const at::Tensor part = pool.acquire(50, at::kFloat, at::kCPU);
  pool.forget(part);
  EXPECT_EQ(pool.allocated_bytes(), 7);
  EXPECT_FALSE(pool.acquire(50, at::kFloat, at::kCPU).is_alias_of(part));
}

TEST(BufferPool, EmptyBuffers) {
  BufferPool pool;
  at::Tensor nothing = pool.acquire(0, at::kFloat, at::kCPU);
  EXPECT_EQ(nothing.numel(), 0);
  pool.release(std::move(nothing));
}

}  // namespace
}  // namespace zeropg
