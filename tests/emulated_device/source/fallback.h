// Any operator of torch on the device: its CPU kernel, on the same memory, when its task runs.
//
// A task knows tensors by address, shape and strides, and keeps nothing alive, as a kernel of a real device. New tensors
// get their shapes from the operator's meta kernel. An operator whose result only its content tells waits for the device.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>

#include "tensors.h"

namespace emulated {

using torch::jit::Stack;

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), stack_(stack) {
    const auto count = op.schema().arguments().size();
    arguments_.assign(stack->end() - static_cast<long>(count), stack->end());
    find_device();
    read_schema();
  }

  void run() {
    const c10::Device before = Guard().exchangeDevice({kType, device_});
    if (unsized_) {
      resize_targets();
    }
    if (random_ && written_ == 1 && tensors_ == 1) {
      draw_now();
    } else if (random_) {
      run_now();
    } else if (waits_for_content()) {
      HostWaits::get().note(kContent);
      run_now();
    } else {
      run_later();
    }
    Guard().setDevice(before);
  }

 private:
  void find_device() {
    device_ = -1;
    const auto look = [this](const at::Tensor& tensor) {
      ++tensors_;
      if (is_ours(tensor)) {
        TORCH_CHECK(
            device_ == -1 || device_ == tensor.get_device(),
            op_.schema().name(), " was given tensors on two devices: emulated:", int{device_}, " and emulated:",
            tensor.get_device());
        device_ = static_cast<c10::DeviceIndex>(tensor.get_device());
      }
      return tensor;
    };
    for (const c10::IValue& argument : arguments_) {
      map_tensors(argument, look);
    }
    for (const c10::IValue& argument : arguments_) {
      if (argument.isDevice() && argument.toDevice().type() == kType && device_ == -1) {
        device_ = Guard::index_of(argument.toDevice());
      }
      map_tensors(argument, [this](const at::Tensor& tensor) {
        TORCH_CHECK(
            !tensor.defined() || is_ours(tensor) || (tensor.is_cpu() && tensor.dim() == 0),
            op_.schema().name(), " was given tensors on two devices: an emulated one and ", tensor.device(), " with ",
            tensor.dim(), " dims");
        return tensor;
      });
    }
    device_ = device_ == -1 ? Current::get().device : device_;
  }

  void read_schema() {
    const auto& schema = op_.schema();
    for (const auto& argument : schema.arguments()) {
      written_ += argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      const size_t index = static_cast<size_t>(&argument - schema.arguments().data());
      unsized_ = unsized_ || (argument.is_out() && arguments_[index].isTensor() && arguments_[index].toTensor().numel() == 0);
      random_ = random_ || argument.type()->str() == "Generator" || argument.type()->str() == "Generator?";
    }
    random_ = random_ || op_.hasTag(at::Tag::nondeterministic_seeded);
    for (const auto& result : schema.returns()) {
      const auto* alias = result.alias_info();
      TORCH_CHECK(alias == nullptr || alias->isWrite(), "the emulated device lacks the view ", schema.name());
      made_ = made_ || alias == nullptr;
      told_ = told_ || (result.type()->kind() != c10::TypeKind::TensorType && result.type()->str() != "Tensor[]");
    }
  }

  // Results that are no tensors, or whose shapes the content tells, make the host wait on any device.
  bool waits_for_content() const {
    return told_ || op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape);
  }

  StreamKey stream() const {
    return Current::get().stream(device_);
  }

  // The arguments as the CPU kernel takes them, made when the task runs.
  std::vector<c10::IValue> captured() const {
    std::vector<c10::IValue> made;
    for (const c10::IValue& argument : arguments_) {
      made.push_back(captured(argument));
    }
    return made;
  }

  c10::IValue captured(const c10::IValue& argument) const {
    if (argument.isDevice()) {
      return c10::Device(at::kCPU);
    }
    if (argument.isGenerator()) {
      return static_cast<EmulatedGenerator*>(argument.toGenerator().unsafeGetGeneratorImpl())->source;
    }
    return map_tensors(argument, [](const at::Tensor& tensor) {
      if (is_ours(tensor)) {
        return Place::of(tensor).on_cpu();
      }
      const bool keep = !tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number();
      return keep ? tensor : tensor.clone();
    });
  }

  static void call_cpu(const c10::OperatorHandle& op, Stack* stack) {
    OnlyKernels only;
    op.callBoxed(stack);
  }

  // Puts the results on the stack: arguments that were written, and the new tensors in their order.
  void finish(const std::vector<c10::IValue>& made) {
    Stack results;
    size_t next = 0;
    const auto& schema = op_.schema();
    for (const auto& result : schema.returns()) {
      if (result.alias_info() == nullptr) {
        results.push_back(made[next++]);
        continue;
      }
      for (size_t index = 0; index < arguments_.size(); ++index) {
        const auto* alias = schema.arguments()[index].alias_info();
        if (alias != nullptr && *alias == *result.alias_info()) {
          results.push_back(arguments_[index]);
          break;
        }
      }
    }
    torch::jit::drop(*stack_, arguments_.size());
    stack_->insert(stack_->end(), results.begin(), results.end());
  }

  // The results that are new tensors, from the whole results of a kernel.
  std::vector<c10::IValue> new_ones(const Stack& results) const {
    std::vector<c10::IValue> found;
    for (size_t index = 0; index < results.size(); ++index) {
      if (op_.schema().returns()[index].alias_info() == nullptr) {
        found.push_back(results[index]);
      }
    }
    return found;
  }

  static at::Tensor empty_like(const at::Tensor& tensor, c10::DeviceIndex device) {
    if (!tensor.defined()) {
      return tensor;
    }
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::Device(kType, device)));
  }

  // The arguments without content.
  Stack on_meta() const {
    const auto empty = [](const at::Tensor& tensor) {
      const auto options = tensor.defined() ? tensor.options().device(at::kMeta) : at::TensorOptions();
      return is_ours(tensor) ? at::empty_strided(tensor.sizes(), tensor.strides(), options) : tensor;
    };
    Stack made;
    for (const c10::IValue& argument : arguments_) {
      made.push_back(argument.isDevice() ? c10::IValue(c10::Device(at::kMeta)) : map_tensors(argument, empty));
    }
    return made;
  }

  // Gives tensors that are to be filled, and are empty, the shapes that the meta kernel gives them.
  void resize_targets() const {
    const Stack given = on_meta();
    Stack stack = given;
    OnlyKernels only;
    op_.callBoxed(&stack);
    for (size_t index = 0; index < arguments_.size(); ++index) {
      if (op_.schema().arguments()[index].is_out() && given[index].isTensor()) {
        const at::Tensor& target = arguments_[index].toTensor();
        if (target.sizes() != given[index].toTensor().sizes()) {
          target.resize_(given[index].toTensor().sizes());
        }
      }
    }
  }

  // The shapes of the results by the meta kernel; false if there is none.
  bool infer(std::vector<c10::IValue>* made) const {
    Stack stack = on_meta();
    try {
      OnlyKernels only;
      op_.callBoxed(&stack);
    } catch (const c10::NotImplementedError&) {
      return false;
    }
    for (const c10::IValue& one : new_ones(stack)) {
      made->push_back(map_tensors(one, [this](const at::Tensor& tensor) { return empty_like(tensor, device_); }));
    }
    return true;
  }

  void run_later() {
    std::vector<c10::IValue> made;
    if (made_ && (Queues::get().policy() == kAtOnce || !infer(&made))) {
      return run_now();
    }
    std::vector<at::Tensor> targets;
    for (const c10::IValue& one : made) {
      map_tensors(one, [&](const at::Tensor& tensor) {
        targets.push_back(tensor.defined() ? Place::of(tensor).on_cpu() : tensor);
        return tensor;
      });
    }
    auto task = [op = op_, arguments = captured(), targets, indices = indices_of_new()] {
      Stack stack(arguments.begin(), arguments.end());
      call_cpu(op, &stack);
      OnlyKernels only;
      size_t next = 0;
      for (const size_t index : indices) {
        map_tensors(stack[index], [&](const at::Tensor& tensor) {
          const at::Tensor& target = targets[next++];
          if (target.defined()) {
            target.copy_(tensor);
          }
          return tensor;
        });
      }
    };
    Queues::get().issue(stream(), std::move(task));
    finish(made);
  }

  std::vector<size_t> indices_of_new() const {
    std::vector<size_t> found;
    for (size_t index = 0; index < op_.schema().returns().size(); ++index) {
      if (op_.schema().returns()[index].alias_info() == nullptr) {
        found.push_back(index);
      }
    }
    return found;
  }

  // Lets the stream catch up and runs the kernel here; what it returns is copied to the device.
  void run_now() {
    Queues::get().run_to(Queues::get().mark(stream()));
    Stack stack;
    for (c10::IValue& argument : captured()) {
      stack.push_back(std::move(argument));
    }
    if (random_) {
      const LentGenerator lent(source());
      call_cpu(op_, &stack);
    } else {
      call_cpu(op_, &stack);
    }
    std::vector<c10::IValue> made;
    for (const c10::IValue& one : new_ones(stack)) {
      made.push_back(map_tensors(one, [this](const at::Tensor& tensor) {
        at::Tensor target = empty_like(tensor, device_);
        if (tensor.defined()) {
          OnlyKernels only;
          Place::of(target).on_cpu().copy_(tensor);
        }
        return target;
      }));
    }
    finish(made);
  }

  at::Generator source() const {
    return static_cast<EmulatedGenerator*>(Hooks::get().getDefaultGenerator(device_).unsafeGetGeneratorImpl())->source;
  }

  // Random numbers into one tensor: drawn now, in the order of issue as on any device, and written by a task.
  void draw_now() {
    Stack stack;
    at::Tensor drawn;
    Place place;
    for (size_t index = 0; index < arguments_.size(); ++index) {
      const c10::IValue& argument = arguments_[index];
      if (argument.isTensor()) {
        place = Place::of(argument.toTensor());
        drawn = at::empty_strided(place.sizes, place.strides, at::TensorOptions().dtype(place.dtype));
        stack.push_back(drawn);
      } else if (argument.isNone() && op_.schema().arguments()[index].type()->str() == "Generator?") {
        stack.push_back(source());
      } else {
        stack.push_back(captured(argument));
      }
    }
    call_cpu(op_, &stack);
    Queues::get().issue(stream(), [place, drawn] {
      OnlyKernels only;
      place.on_cpu().copy_(drawn);
    });
    finish({});
  }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  std::vector<c10::IValue> arguments_;
  c10::DeviceIndex device_ = -1;
  int tensors_ = 0, written_ = 0;
  bool random_ = false, made_ = false, told_ = false, unsized_ = false;
};

inline void any_operator(const c10::OperatorHandle& op, Stack* stack) {
  OnlyKernels only;
  Call(op, stack).run();
}

} // namespace emulated
