// A `cuda` device for CPU builds of torch. Its memory is the host's, and its kernels are those of the CPU.
//
// Tensors are ordinary tensors with device cuda:0, so autograd, autocast, optimizers and FSDP treat them as on a GPU.
// torch has three hooks for this: an allocator and kernels under the dispatch key CUDA, a device guard, and CUDAHooks.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;
using c10::Stream;

const Device kGpu(DeviceType::CUDA, 0);

// ---------------------------------------------------------------------------------------------------- memory

std::atomic<int64_t> live_bytes{0}, peak_bytes{0}, limit_bytes{0};  // limit 0: none

void reserve(int64_t bytes) {
  const int64_t now = live_bytes += bytes;
  if (limit_bytes > 0 && now > limit_bytes) {
    live_bytes -= bytes;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes, " bytes.");
  }
  int64_t top = peak_bytes;
  while (now > top && !peak_bytes.compare_exchange_weak(top, now)) {
  }
}

struct DeviceAllocator final : c10::Allocator {
  struct Block {
    void* memory;
    int64_t bytes;
  };

  c10::DataPtr allocate(size_t bytes) override {
    reserve(static_cast<int64_t>(bytes));
    constexpr size_t kAlign = 512;
    void* memory = bytes ? std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign) : nullptr;
    return {memory, new Block{memory, static_cast<int64_t>(bytes)}, &release, kGpu};
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    live_bytes -= block->bytes;
    std::free(block->memory);
    delete block;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceAllocator allocator;

// Memory of the host that the device may read while the host goes on. torch asks by address whether it is pinned.
struct PinnedAllocator final : c10::Allocator {
  std::map<const char*, size_t> blocks;
  std::mutex mutex;

  c10::DataPtr allocate(size_t bytes) override;
  bool contains(const void* address) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto after = blocks.upper_bound(static_cast<const char*>(address));
    if (after == blocks.begin()) return false;
    const auto [start, bytes] = *std::prev(after);
    return address < start + bytes;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

PinnedAllocator pinned;

c10::DataPtr PinnedAllocator::allocate(size_t bytes) {
  auto* memory = static_cast<char*>(std::malloc(bytes ? bytes : 1));
  const std::lock_guard<std::mutex> lock(mutex);
  blocks[memory] = bytes;
  return {memory, memory,
          [](void* block) {
            const std::lock_guard<std::mutex> freed(pinned.mutex);
            pinned.blocks.erase(static_cast<char*>(block));
            std::free(block);
          },
          c10::kCPU};
}

// ---------------------------------------------------------------- one memory, seen from the host and the device

Tensor over(Storage storage, const Tensor& like, DispatchKey key) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return Tensor(std::move(impl));
}

// The CPU tensor over the memory of a device tensor.
Tensor seen_from_host(const Tensor& device) {
  Storage memory = device.storage();
  void* data = memory.mutable_data();
  const size_t bytes = memory.nbytes();
  c10::DataPtr kept(data, new Storage(std::move(memory)), [](void* s) { delete static_cast<Storage*>(s); }, c10::kCPU);
  Storage alias(Storage::use_byte_size_t(), bytes, std::move(kept), c10::GetCPUAllocator(), /*resizable=*/true);
  return over(std::move(alias), device, DispatchKey::CPU);
}

// Memory that a CPU kernel allocated, counted as memory of the device from now on.
c10::DataPtr taken_over(const Storage& host) {
  struct Owner {
    Storage storage;
    int64_t bytes;
  };
  const auto bytes = static_cast<int64_t>(host.nbytes());
  reserve(bytes);
  return {host.mutable_data(), new Owner{host, bytes},
          [](void* context) {
            auto* owner = static_cast<Owner*>(context);
            live_bytes -= owner->bytes;
            delete owner;
          },
          kGpu};
}

// -------------------------------------------------------------------------------- operators: run the CPU's kernel

// CUDA kernels of these operators also read tensors on the host, if their first argument is on the device.
const std::unordered_set<std::string> kReadHost = {
    "aten::copy_",      "aten::_to_copy",       "aten::_copy_from",           "aten::_foreach_copy_",
    "aten::index",      "aten::index_put",      "aten::index_put_",           "aten::_index_put_impl_",
    "aten::_fused_adamw_"};

// One call of an operator: its device tensors are replaced by their host views, and its results go back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    replace_arguments();
    check_devices();
    {
      at::AutoDispatchBelowADInplaceOrView no_autograd;
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack_);
    }
    for (auto& [device, host] : pairs_) take_over_resized(device, host);
    if (!pairs_.empty() || makes_device_tensor_) replace_results();
  }

 private:
  void replace_arguments() {
    const size_t count = op_.schema().arguments().size();
    for (size_t i = 0; i < count; ++i) {
      c10::IValue& value = (*stack_)[stack_->size() - count + i];
      if (value.isTensor()) {
        if (i == 0) first_on_device_ = value.toTensor().defined() && value.toTensor().is_cuda();
        value = host_view(value.toTensor());
      } else if (value.isTensorList()) {
        auto tensors = value.toTensorVector();
        if (i == 0) first_on_device_ = !tensors.empty() && tensors[0].defined() && tensors[0].is_cuda();
        for (auto& tensor : tensors) tensor = host_view(tensor);
        value = tensors;
      } else if (value.isOptionalTensorList()) {
        const auto given = value.toOptionalTensorList();
        c10::List<std::optional<Tensor>> views;
        for (size_t j = 0; j < given.size(); ++j) {
          const std::optional<Tensor> tensor = given.get(j);
          views.push_back(tensor ? std::optional<Tensor>(host_view(*tensor)) : tensor);
        }
        value = views;
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        makes_device_tensor_ = true;
        value = Device(c10::kCPU);
      } else if (value.isGenerator() && value.toGenerator().defined()) {
        TORCH_CHECK(!value.toGenerator().device().is_cpu(),
                    "Expected a 'cuda' device type for generator but found 'cpu'");
      }
    }
  }

  Tensor host_view(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {  // 0-d tensors on the host are allowed everywhere: kernels take them as numbers
      reads_host_ |= tensor.device().is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    for (auto& [device, host] : pairs_)
      if (device.is_same(tensor)) return host;
    pairs_.emplace_back(tensor, seen_from_host(tensor));
    return pairs_.back().second;
  }

  void check_devices() const {
    const std::string& name = op_.schema().name();
    const bool allowed = kReadHost.count(name) && (first_on_device_ || name == "aten::copy_");
    TORCH_CHECK(!reads_host_ || pairs_.empty() || allowed,
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (in ",
                name, ")");
  }

  // An operator may have resized or reshaped an output in place.
  static void take_over_resized(const Tensor& device, const Tensor& host) {
    if (host.storage().data() != device.storage().data()) {
      auto* storage = device.storage().unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(taken_over(host.storage()));
      storage->set_nbytes(host.storage().nbytes());
    }
    if (host.sizes() != device.sizes() || host.strides() != device.strides())
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  void replace_results() {
    for (size_t i = stack_->size() - op_.schema().returns().size(); i < stack_->size(); ++i) {
      c10::IValue& value = (*stack_)[i];
      if (value.isTensor()) {
        value = on_device(value.toTensor());
      } else if (value.isTensorList()) {
        auto tensors = value.toTensorVector();
        for (auto& tensor : tensors) tensor = on_device(tensor);
        value = tensors;
      }
    }
  }

  Tensor on_device(const Tensor& result) const {
    if (!result.defined() || result.is_cuda()) return result;
    for (const auto& [device, host] : pairs_)
      if (host.is_same(result)) return device;  // an output argument
    for (const auto& [device, host] : pairs_)
      if (host.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())
        return over(device.storage(), result, DispatchKey::CUDA);  // a view of an argument
    const size_t bytes = result.storage().nbytes();
    Storage fresh(Storage::use_byte_size_t(), bytes, taken_over(result.storage()), &allocator, /*resizable=*/true);
    return over(std::move(fresh), result, DispatchKey::CUDA);
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;  // device tensor, its host view
  bool makes_device_tensor_ = false, reads_host_ = false, first_on_device_ = false;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// --------------------------------------------------------- operators that cannot run on a view of the memory

Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& self, Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({count});
  return self;
}

void record_stream(Tensor&, Stream) {}  // everything runs in order

// A CPU build of torch has no `UntypedStorage.resize_` for CUDA.
void resize_storage(const Tensor& tensor, int64_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr fresh = allocator.allocate(bytes);
  if (bytes && storage->nbytes())
    std::memcpy(fresh.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

Tensor host(const Tensor& tensor) { return tensor.is_cuda() ? seen_from_host(tensor) : tensor; }

Tensor device(const Tensor& tensor) {
  if (tensor.is_cuda()) return tensor;
  const size_t bytes = tensor.storage().nbytes();
  Storage fresh(Storage::use_byte_size_t(), bytes, taken_over(tensor.storage()), &allocator, true);
  return over(std::move(fresh), tensor, DispatchKey::CUDA);
}

TORCH_LIBRARY(virtual_cuda, m) {
  m.def("host(Tensor(a) tensor) -> Tensor(a)");
  m.def("device(Tensor(a) tensor) -> Tensor(a)");
  m.def("resize_storage(Tensor tensor, int bytes) -> ()");
  m.def("live_bytes() -> int", [] { return live_bytes.load(); });
  m.def("peak_bytes() -> int", [] { return peak_bytes.load(); });
  m.def("reset_peak() -> ()", [] { peak_bytes = live_bytes.load(); });
  m.def("set_limit(int bytes) -> ()", [](int64_t bytes) { limit_bytes = bytes; });
}
TORCH_LIBRARY_IMPL(virtual_cuda, CUDA, m) {
  m.impl("host", &host);
  m.impl("device", &device);
  m.impl("resize_storage", &resize_storage);
}
TORCH_LIBRARY_IMPL(virtual_cuda, CPU, m) {
  m.impl("host", &host);
  m.impl("device", &device);
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("record_stream", &record_stream);
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

// ------------------------------------------------------------------------------- what torch asks about the device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kGpu; }
  Device getDevice() const override { return kGpu; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kGpu); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kGpu); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, kGpu); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};
c10::impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new Guard());

const bool allocator_is_set = [] {
  c10::SetAllocator(DeviceType::CUDA, &allocator, /*priority=*/1);
  return true;
}();

}  // namespace

namespace at {
// Autograd runs the backward pass of an accelerator in a thread of its own, and asks these hooks for it.
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void* address) const override { return pinned.contains(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
