#include "sharding/gradients/grad_view.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <string>

namespace zeropg {
namespace {

std::string error_of(const at::Tensor& tensor) {
  try {
    tensor.const_data_ptr();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

class GradViewTest : public testing::Test {
 protected:
  at::Tensor parameter_ = at::zeros({2, 3});
  at::Tensor values_ = at::arange(6, at::kFloat);
  GradView view_{parameter_};
};

TEST_F(GradViewTest, shows_a_view_in_the_parameters_shape_and_the_same_one_again) {
  view_.show(values_);
  const at::Tensor shown = parameter_.grad();
  EXPECT_TRUE(view_.is_shown());
  EXPECT_TRUE(shown.is_alias_of(values_));
  EXPECT_EQ(shown.sizes(), parameter_.sizes());
  view_.show(values_);
  EXPECT_TRUE(parameter_.grad().is_same(shown));
}

TEST_F(GradViewTest, notices_a_tensor_or_data_that_the_user_puts_there) {
  view_.show(values_);
  parameter_.grad().set_data(at::ones({2, 3}));
  EXPECT_FALSE(view_.is_shown());
  view_.show(values_);
  parameter_.mutable_grad() = at::ones({2, 3});
  EXPECT_FALSE(view_.is_shown());
}

TEST_F(GradViewTest, moves_what_the_user_still_has_to_other_memory) {
  view_.show(values_);
  const at::Tensor kept = parameter_.grad();
  view_.move_to(values_.clone());
  EXPECT_FALSE(kept.is_alias_of(values_));
  EXPECT_TRUE(kept.reshape({-1}).equal(values_));
  EXPECT_TRUE(view_.is_shown());
}

TEST_F(GradViewTest, hides_what_is_shown_while_autograd_accumulates) {
  view_.show(values_);
  const at::Tensor shown = parameter_.grad();
  view_.take_away();
  EXPECT_FALSE(parameter_.grad().defined());
  parameter_.mutable_grad() = at::ones({2, 3});  // autograd
  EXPECT_FALSE(view_.is_shown());
  view_.put_back();
  EXPECT_TRUE(parameter_.grad().is_same(shown));
}

TEST_F(GradViewTest, leaves_a_tensor_of_the_users_where_it_is) {
  parameter_.mutable_grad() = at::ones({2, 3});
  view_.take_away();
  EXPECT_TRUE(parameter_.grad().defined());
  view_.abandon(/*had_gradient=*/true, "weight");
  EXPECT_TRUE(parameter_.grad().defined());
  EXPECT_FALSE(view_.is_lost());
}

TEST_F(GradViewTest, says_after_a_backward_that_raised_that_the_earlier_gradient_is_lost) {
  view_.show(values_);
  view_.take_away();
  parameter_.mutable_grad() = at::ones({2, 3});
  view_.abandon(/*had_gradient=*/true, "weight");
  EXPECT_TRUE(view_.is_lost());
  EXPECT_NE(error_of(parameter_.grad()).find("the gradient of 'weight' was dropped"), std::string::npos);
  parameter_.mutable_grad().reset();
  EXPECT_FALSE(view_.is_lost());
}

TEST_F(GradViewTest, drops_what_it_showed_where_nothing_was_accumulated_before) {
  view_.show(values_);
  view_.abandon(/*had_gradient=*/false, "weight");
  EXPECT_FALSE(parameter_.grad().defined());
}

TEST_F(GradViewTest, stands_for_a_gradient_that_cannot_be_read_and_says_why) {
  view_.show_sharded("weight");
  EXPECT_TRUE(view_.is_shown());
  EXPECT_EQ(parameter_.grad().sizes(), parameter_.sizes());
  EXPECT_NE(error_of(parameter_.grad()).find("'weight' is sharded"), std::string::npos);
  GradView other(at::zeros({2}));
  other.show_unreduced("bias");
  EXPECT_NE(error_of(other.gradient()).find("'bias' is not reduced yet"), std::string::npos);
}

TEST_F(GradViewTest, a_whole_gradient_is_the_users_to_change) {
  view_.show_sharded("weight");
  view_.show_full(values_);
  EXPECT_TRUE(view_.is_full());
  EXPECT_FALSE(view_.is_shown());
  EXPECT_TRUE(parameter_.grad().equal(values_.view({2, 3})));
  view_.end_full();
  EXPECT_FALSE(view_.is_full());
}

}  // namespace
}  // namespace zeropg
