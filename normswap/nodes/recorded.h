// What autograd's nodes know of a norm: its kind, what its op is given, and where that stands.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "launches.h"

namespace {

using c10::IValue;
using c10::OperatorHandle;
using Tensors = std::vector<Tensor>;

enum Kind { kLayerNorm, kRmsNorm, kGroupNorm, kBatchNorm };
constexpr const char* kKinds[] = {"layer_norm", "rms_norm", "group_norm", "batch_norm"};
constexpr const char* kNodes[] = {"_LayerNormBackward", "_RMSNormBackward", "_GroupNormBackward", "_BatchNormBackward"};

// What a backward may need: the tensors that may learn, other arguments, what the forward has kept.
enum Slot {
  kInput, kWeight, kBias, kResidual, kScale, kShift, kInputBias, kLearning,
  kMean = kLearning, kVar, kKept, kSigns, kSlots
};
constexpr const char* kTensors[] = {"input", "weight",     "bias",         "residual",   "scale",
                                    "shift", "input_bias", "running_mean", "running_var"};

// kApart: the kernels' number of the dtype of a residual of 16 bits before a norm of float32; else 0.
enum Number { kSize, kEps, kOffset, kCast, kTraining, kActivation, kLow, kHigh, kGiven, kApart = kGiven, kNumbers };
constexpr const char* kScalars[] = {"dims", "eps", "weight_offset", "cast_before_weight", "training", "activation"};

constexpr double kRelu = 1;  // as the kernels number activations, 0 is none

using Numbers = std::array<double, kNumbers>;
using Wanted = std::array<bool, kLearning>;

bool is_of_rows(Kind kind) { return kind < kGroupNorm; }

OperatorHandle native(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("normswap::" + name).c_str(), "");
}

// Where the arguments of an op stand, -1 for what it has not; read from its schema.
struct Norm {
  explicit Norm(Kind kind) : kind(kind), recorded(native(kKinds[kind] + std::string("_recorded"))) {
    const auto& plain = native(kKinds[kind] + std::string("_or_none")).schema();
    arguments = plain.arguments().size();
    outputs = plain.returns().size();
    kept = recorded.schema().returns().size() - outputs;
    const auto place = [&](const char* name) { return plain.argumentIndexWithName(name).value_or(-1); };
    std::transform(std::begin(kTensors), std::end(kTensors), tensors.begin(), place);
    std::transform(std::begin(kScalars), std::end(kScalars), numbers.begin(), place);
    if (kind == kGroupNorm) numbers[kSize] = place("num_groups");
    dtype = place("dtype"), wide = place("wide"), batches = place("batches"), momentum = place("momentum");
    if (numbers[kActivation] >= 0) numbers[kLow] = numbers[kActivation] + 1, numbers[kHigh] = numbers[kLow] + 1;
  }

  Kind kind;
  OperatorHandle recorded;
  size_t arguments, outputs, kept;
  std::array<int, kKept> tensors;
  std::array<int, kGiven> numbers = {-1, -1, -1, -1, -1, -1, -1, -1};
  int dtype, wide;        // of the output
  int batches, momentum;  // of a BatchNorm
};

double number_of(const IValue& value) {
  return value.isDouble() ? value.toDouble() : value.isBool() ? value.toBool() : static_cast<double>(value.toInt());
}

IValue optional(const Tensor& t) { return t.defined() ? IValue(t) : IValue(); }
Tensor tensor(const IValue& value) { return value.isTensor() ? value.toTensor() : Tensor(); }

// Of a scale of one value, from a gradient of each channel.
Tensor summed_as(const Tensor& grad, const Tensor& scale) {
  return grad.numel() == scale.numel() ? grad : grad.sum().reshape(scale.sizes()).to(scale.scalar_type());
}

// Of a norm of channels; else the weight stands for it, of one dtype with it: see needs.
bool keeps_bias(const Tensors& saved, const Numbers& n) { return saved[kBias].defined() || n[kActivation] != 0; }

// How many elements a row has, over which the last dims are normalised.
int64_t columns_of(const Tensor& input, const Numbers& n) {
  const auto shape = input.sizes();
  return c10::multiply_integers(shape.slice(shape.size() - static_cast<size_t>(n[kSize])));
}

}  // namespace
