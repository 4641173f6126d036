// Device memory that the host cannot read.
//
// The same pages are mapped twice: under the addresses that tensors hold, where any access is a fault, and under others
// that only tasks of the device use. A freed block goes back at once to the stream that it was allocated on, although
// tasks may still be queued: those of that stream come first, and other streams must have been recorded.

#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <unordered_map>
#include <vector>

#include <c10/core/Allocator.h>

#include "queues.h"

namespace emulated {

constexpr size_t kDeviceBytes = size_t{1} << 32;
constexpr size_t kArenaBytes = kDeviceBytes * kDevices;
constexpr size_t kAlignment = 64;

class Memory {
 public:
  static Memory& get() {
    static auto* memory = new Memory;
    return *memory;
  }

  void* allocate(size_t bytes, StreamKey stream) {
    std::lock_guard lock(mutex_);
    const size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    take_back();
    auto& free = free_[{stream, size}];
    char* found = nullptr;
    if (free.empty()) {
      size_t& used = used_[static_cast<size_t>(stream.device)];
      TORCH_CHECK_WITH(OutOfMemoryError, used + size <= kDeviceBytes, "the emulated device has no ", size, " bytes left");
      found = base_ + static_cast<size_t>(stream.device) * kDeviceBytes + used;
      used += size;
    } else {
      found = free.back();
      free.pop_back();
    }
    blocks_[found] = {size, stream, {}};
    live_[static_cast<size_t>(stream.device)] += size;
    peak_[static_cast<size_t>(stream.device)] =
        std::max(peak_[static_cast<size_t>(stream.device)], live_[static_cast<size_t>(stream.device)]);
    return found;
  }

  void release(void* pointer) {
    std::lock_guard lock(mutex_);
    auto found = blocks_.find(static_cast<char*>(pointer));
    Block block = std::move(found->second);
    blocks_.erase(found);
    live_[static_cast<size_t>(block.stream.device)] -= block.size;
    if (block.uses.empty()) {
      free_[{block.stream, block.size}].push_back(static_cast<char*>(pointer));
    } else {
      for (Mark& use : block.uses) {
        use = Queues::get().mark(use.stream);
      }
      waiting_.emplace_back(static_cast<char*>(pointer), std::move(block));
    }
  }

  // The block is used on `stream` too: it is not given away before that stream has done what it was told until then.
  void record(const void* pointer, StreamKey stream) {
    std::lock_guard lock(mutex_);
    auto found = blocks_.find(static_cast<char*>(const_cast<void*>(pointer)));
    if (found != blocks_.end() && (stream < found->second.stream || found->second.stream < stream)) {
      found->second.uses.push_back({stream, 0});
    }
  }

  bool holds(const void* pointer) const {
    return pointer >= base_ && pointer < base_ + kArenaBytes;
  }

  c10::DeviceIndex device_of(const void* pointer) const {
    return static_cast<c10::DeviceIndex>((static_cast<const char*>(pointer) - base_) / kDeviceBytes);
  }

  // The address under which tasks find the memory.
  void* inside(const void* pointer) const {
    return pointer == nullptr ? nullptr : inner_ + (static_cast<const char*>(pointer) - base_);
  }

  size_t peak(c10::DeviceIndex device) const {
    return peak_[static_cast<size_t>(device)];
  }

 private:
  struct Block {
    size_t size = 0;
    StreamKey stream{};
    std::vector<Mark> uses;
  };

  Memory() {
    const int file = memfd_create("emulated device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArenaBytes) == 0, "no memory for the emulated device");
    const auto map = [file](int protection) {
      void* found = mmap(nullptr, kArenaBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(found != MAP_FAILED, "no memory for the emulated device");
      return static_cast<char*>(found);
    };
    base_ = map(PROT_NONE);
    inner_ = map(PROT_READ | PROT_WRITE);
    close(file);
  }

  void take_back() {
    for (size_t index = 0; index < waiting_.size();) {
      auto& [pointer, block] = waiting_[index];
      bool done = true;
      for (const Mark& use : block.uses) {
        done = done && Queues::get().reached(use);
      }
      if (done) {
        free_[{block.stream, block.size}].push_back(pointer);
        waiting_[index] = std::move(waiting_.back());
        waiting_.pop_back();
      } else {
        ++index;
      }
    }
  }

  std::recursive_mutex mutex_;
  char* base_ = nullptr;
  char* inner_ = nullptr;
  std::array<size_t, kDevices> used_{}, live_{}, peak_{};
  std::unordered_map<char*, Block> blocks_;
  std::map<std::pair<StreamKey, size_t>, std::vector<char*>> free_;
  std::vector<std::pair<char*, Block>> waiting_;
};

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const StreamKey stream = Current::get().stream(Current::get().device);
    void* data = bytes == 0 ? nullptr : Memory::get().allocate(bytes, stream);
    return {data, data, &DeviceAllocator::release, c10::Device(kType, stream.device)};
  }
  static void release(void* pointer) {
    if (pointer != nullptr) {
      Memory::get().release(pointer);
    }
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &DeviceAllocator::release;
  }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "the host copies device memory");
  }
  static DeviceAllocator& get() {
    static auto* allocator = new DeviceAllocator;
    return *allocator;
  }
};

// Host memory that the device reads and writes by itself. It begins as NaN, so that what is read too early shows.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes == 0 ? nullptr : std::malloc(bytes);
    if (data != nullptr) {
      std::memset(data, 0xFF, bytes);
      std::lock_guard lock(mutex_);
      sizes_[static_cast<char*>(data)] = bytes;
    }
    return {data, data, &PinnedAllocator::release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* pointer) {
    std::lock_guard lock(get().mutex_);
    get().sizes_.erase(static_cast<char*>(pointer));
    std::free(pointer);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &PinnedAllocator::release;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool holds(const void* pointer) {
    std::lock_guard lock(mutex_);
    auto after = sizes_.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    if (after == sizes_.begin()) {
      return false;
    }
    const auto& [start, bytes] = *std::prev(after);
    return pointer < start + bytes;
  }
  static PinnedAllocator& get() {
    static auto* allocator = new PinnedAllocator;
    return *allocator;
  }

 private:
  std::mutex mutex_;
  std::map<char*, size_t> sizes_;
};

// Says what happened when the host reads or writes device memory, and leaves the rest to whoever handled faults before.
class FaultReport {
 public:
  static void install() {
    Memory::get();
    struct sigaction action {};
    action.sa_sigaction = &FaultReport::handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before());
  }

 private:
  static void handle(int, siginfo_t* info, void*) {
    if (Memory::get().holds(info->si_addr)) {
      const char told[] = "the host touched memory of the emulated device; copy it with .cpu() first.\n";
      const auto written = write(STDERR_FILENO, told, sizeof(told) - 1);
      static_cast<void>(written);
    }
    sigaction(SIGSEGV, &before(), nullptr); // the access is made again, and ends the process
  }
  static struct sigaction& before() {
    static struct sigaction action {};
    return action;
  }
};

} // namespace emulated
