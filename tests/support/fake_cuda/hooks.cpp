// A CUDA device for torch's CPU build: a guard whose streams and events do nothing, and hooks that say there is one
// device. With it autograd and factory functions take the device type "cuda"; tensors on it are fake, without values.
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::Stream;

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device only() const { return Device(c10::DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return only(); }
  Device getDevice() const override { return only(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, only()); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, only()); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, only()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, only()); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// An H100's first choice. Were none registered, torch would take the attention that is composed of FP32 matmuls.
static int64_t attention(
    const at::Tensor& query, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask, double, bool,
    std::optional<double>, bool grouped) {
  using enum at::SDPBackend;
  const auto kind = query.scalar_type();
  if (mask && mask->requires_grad()) return static_cast<int64_t>(efficient_attention);  // T5's positions are trained
  const auto fused = kind == at::kFloat && !grouped ? efficient_attention : math;
  return static_cast<int64_t>(kind == at::kHalf || kind == at::kBFloat16 ? cudnn_attention : fused);
}
namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &attention)
}

namespace at { namespace cuda {
// torch looks for hooks of this name.
struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
}} // namespace at::cuda
