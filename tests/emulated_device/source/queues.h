// Streams as queues on the host: what the device was told to do, and has not done yet.
//
// A task runs when a policy says so, or when the host waits for it. Only the order within a stream and the waits for
// events are kept, which is all that a real device promises.
//
//     at once    a task runs when it is issued: no order can be missing
//     late       nothing runs before the host waits, and then only what it waits for
//     early      side streams run what they are given at once, the default stream is late
//     random     after each task, a stream drawn from a seed runs a few of its tasks

#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

namespace emulated {

constexpr c10::DeviceIndex kDevices = 8;
constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

enum Policy : int { kAtOnce, kLate, kEarly, kRandom };

struct StreamKey {
  c10::DeviceIndex device;
  c10::StreamId id;
  bool operator<(const StreamKey& other) const {
    return device != other.device ? device < other.device : id < other.id;
  }
  static StreamKey of(const c10::Stream& stream) {
    return {stream.device_index(), stream.id()};
  }
};

// A place in a stream: everything up to task number `issued`.
struct Mark {
  StreamKey stream;
  uint64_t issued;
};

struct Task {
  std::function<void()> run;
  std::deque<Mark> waits;
};

struct Queue {
  std::deque<Task> tasks;
  uint64_t issued = 0, done = 0;
};

class Queues {
 public:
  // Never destroyed: tensors are freed until the process ends.
  static Queues& get() {
    static auto* queues = new Queues;
    return *queues;
  }

  void set_policy(int policy, uint64_t seed) {
    std::lock_guard lock(mutex_);
    for (auto& [key, queue] : queues_) {
      run_to({key, queue.issued});
    }
    policy_ = static_cast<Policy>(policy);
    random_ = seed * 0x9E3779B97F4A7C15ULL + 1;
  }

  Policy policy() const {
    return policy_;
  }

  Mark mark(StreamKey key) {
    std::lock_guard lock(mutex_);
    return {key, queues_[key].issued};
  }

  bool reached(const Mark& mark) {
    std::lock_guard lock(mutex_);
    return queues_[mark.stream].done >= mark.issued;
  }

  // The marks of all streams of a device.
  std::deque<Mark> marks(c10::DeviceIndex device) {
    std::lock_guard lock(mutex_);
    std::deque<Mark> found;
    for (auto& [key, queue] : queues_) {
      if (key.device == device) {
        found.push_back({key, queue.issued});
      }
    }
    return found;
  }

  void issue(StreamKey key, std::function<void()> run, std::deque<Mark> waits = {}) {
    std::lock_guard lock(mutex_);
    Queue& queue = queues_[key];
    queue.tasks.push_back({std::move(run), std::move(waits)});
    ++queue.issued;
    ++issued_;
    if (policy_ == kAtOnce || (policy_ == kEarly && key.id != 0)) {
      run_to({key, queue.issued});
    } else if (policy_ == kRandom && draw(3) == 0) {
      run_some();
    }
  }

  // Runs everything up to `mark`, and what that waits for.
  void run_to(Mark mark) {
    std::lock_guard lock(mutex_);
    Queue& queue = queues_[mark.stream];
    while (queue.done < mark.issued) {
      TORCH_CHECK(!queue.tasks.empty(), "a stream of the emulated device waits for itself");
      Task task = std::move(queue.tasks.front());
      queue.tasks.pop_front();
      for (const Mark& before : task.waits) {
        run_to(before);
      }
      ++queue.done;
      if (task.run) {
        task.run();
      }
    }
  }

  void run_device(c10::DeviceIndex device) {
    for (const Mark& mark : marks(device)) {
      run_to(mark);
    }
  }

  uint64_t issued() const {
    return issued_;
  }

 private:
  uint64_t draw(uint64_t below) {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return random_ % below;
  }

  void run_some() {
    auto chosen = queues_.begin();
    std::advance(chosen, static_cast<long>(draw(queues_.size())));
    const Queue& queue = chosen->second;
    run_to({chosen->first, std::min(queue.issued, queue.done + 1 + draw(4))});
  }

  std::recursive_mutex mutex_;
  std::map<StreamKey, Queue> queues_;
  Policy policy_ = kAtOnce;
  uint64_t random_ = 1, issued_ = 0;
};

// What a thread has set: its device, and its stream on each device.
struct Current {
  c10::DeviceIndex device = 0;
  std::array<c10::StreamId, kDevices> streams{};

  static Current& get() {
    static thread_local Current current;
    return current;
  }
  StreamKey stream(c10::DeviceIndex index) const {
    return {index, streams[static_cast<size_t>(index)]};
  }
};

} // namespace emulated
