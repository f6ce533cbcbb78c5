// The machine that kernels run on: threads of one cluster at a time, each a fiber, and the asynchronous
// operations they have issued. README.md says what is modelled.
#pragma once

#include <cuda_runtime_api.h>

#include <csetjmp>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

namespace emulator {

struct Block;
struct Thread;
struct Warp;
struct Warpgroup;
struct Multiplication;

// Threads that wait for the same thing.
using Waiters = std::vector<Thread*>;

// Ends the emulation with a message that says which thread broke which rule.
[[noreturn]] void fail(const std::string& rule);
// Of each thread of a block of which an SM has so many.
int launch_registers(int blocks);

// Operations that happen in order, or in any order, at any time after they were issued.
struct AsyncQueue {
  enum Kind { kWrites, kReads };  // shared memory

  explicit AsyncQueue(Kind kind = kWrites) : kind(kind) {}

  const Kind kind;
  std::deque<std::function<void()>> operations;
  int64_t issued = 0, done = 0;
  bool is_ordered = true;
  bool is_listed = false;
  bool is_owned = false;  // by the list of what is under way; ends with its last operation
  Waiters waiters;

  void issue(std::function<void()> operation);
  void run_first();
  void run_all() {
    while (!operations.empty()) run_first();
  }
  // The current thread waits until so many have been done.
  void wait_until(int64_t count);
};

// Groups of one thread's operations, as cp.async and bulk stores have them.
struct AsyncGroups {
  explicit AsyncGroups(AsyncQueue::Kind kind) : queue(kind) {}

  AsyncQueue queue;
  std::vector<int64_t> ends;  // operations issued when each group was closed
  int64_t awaited = 0;

  void commit() { ends.push_back(queue.issued); }
  void wait(int pending) {
    if (static_cast<int>(ends.size()) <= pending) return;
    awaited = ends[ends.size() - 1 - pending];
    queue.wait_until(awaited);
  }
};

struct MBarrier {
  uint32_t expected = 0, pending = 0, phase = 0;
  int64_t bytes = 0;
  Waiters waiters;
};

struct NamedBarrier {
  uint32_t arrived = 0, expected = 0;
  bool all_fenced = true;
  Waiters waiters;
};

// Accumulators that wgmma has taken from a thread, which finds NaN there until it has waited.
struct Accumulators {
  float* registers;
  int count;
  int64_t last_use;  // number of the warpgroup's wgmma
  std::unique_ptr<float[]> values;
};

struct Thread {
  jmp_buf context;
  bool has_started = false;
  std::unique_ptr<char[], void (*)(char*)> stack{nullptr, [](char*) {}};
  Block* block;
  Warp* warp;
  Warpgroup* warpgroup;
  uint3 idx;
  int lane;
  bool is_done = false;
  struct {
    const char* what = "nothing yet";
    uint32_t first = 0, second = 0;
  } waits_for;

  AsyncGroups copies{AsyncQueue::kWrites};      // cp.async
  AsyncGroups bulk_stores{AsyncQueue::kReads};  // TMA stores
  AsyncQueue remote_writes;                     // to other blocks' shared memory
  bool has_fenced_async = false;                // fence.proxy.async since the last barrier
  bool barrier_was_fenced = false;              // all threads of the last barrier had done so before it
  std::vector<uint32_t> unfenced_writes;        // units of shared memory stored to since the last fence.proxy.async
  bool waited_for_previous = false;             // griddepcontrol.wait
  bool is_cluster_arrived = false;
  uint32_t cluster_phase = 0;
  int registers;
  const uint64_t* polled = nullptr;  // the flag that was loaded last
  int64_t polled_at = 0;             // after so many stores of flags

  // wgmma
  int64_t num_issued = 0;
  std::vector<int64_t> group_ends;
  bool has_fenced_registers = false;
  std::vector<Accumulators> accumulators;
};

// A warp-wide operation that all lanes must reach before one of them goes on.
struct Rendezvous {
  const char* kind = nullptr;
  uint32_t mask = 0, arrived = 0;
  void* arguments[32];
  Waiters waiters;
};

struct Warp {
  uint32_t ready = 0;
  uint64_t priority = 0;
  Thread* threads[32] = {};
  Rendezvous rendezvous;
};

// Four warps that multiply together.
struct Warpgroup {
  const Block* block;
  std::deque<std::shared_ptr<Multiplication>> forming;  // wgmma that some threads have issued, not all
  int64_t num_formed = 0;
  AsyncQueue multiplications{AsyncQueue::kReads};
  Waiters waiters;  // for more to be formed
};

// Bytes of shared memory whose last writer is known.
inline constexpr uint32_t kFencedUnit = 16;

struct Block {
  uint3 idx;
  uint32_t rank;
  uint8_t* memory;  // offset 0 of the shared window
  uint32_t dynamic_begin = 0, memory_bytes = 0;
  bool is_done = false;
  int num_live = 0;
  int64_t loads_under_way = 0;
  int64_t free_registers = 0;
  Waiters register_waiters;
  bool has_voted_yes = false;  // __syncthreads_or
  // Of each unit, the thread that has stored to it without fence.proxy.async since, from 1; 0: none.
  std::vector<uint16_t> unfenced_writers;
  std::unordered_map<uint32_t, MBarrier> mbarriers;
  NamedBarrier named_barriers[16];
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::unique_ptr<Warpgroup>> warpgroups;
  std::vector<std::unique_ptr<Thread>> threads;
};

struct Launch {
  dim3 grid, block;
  size_t shared_bytes = 0;
  unsigned cluster_size = 1;
  bool starts_early = false;
};

// How the machine behaves where hardware may choose.
struct Options {
  uint64_t seed = 0;
  bool last_cluster_first = false;
  int num_sms = 4;
  // Whether warps of a warpgroup may be further apart than the group of wgmma that one of them commits.
  bool loose_warpgroups = false;
  int mutant = 0;
};

class Machine {
 public:
  static Machine& get();

  Options options;
  Launch launch;
  Thread* current = nullptr;
  std::vector<std::unique_ptr<Block>> cluster;

  // Runs the grid; an error in it is what last_error() returns until the next call.
  cudaError_t run(const Launch& launch, const std::function<void()>& thread_body);
  std::string last_error;

  // The current thread waits until someone wakes it. `what` is a text with up to two % for the numbers.
  void wait(Waiters& waiters, const char* what, uint32_t first = 0, uint32_t second = 0);
  void wake(Thread* thread);
  void wake(Waiters& waiters);
  // A point where another thread may go on instead.
  void may_switch();
  bool chance(double probability) { return std::uniform_real_distribution<>()(random_) < probability; }

  void list(AsyncQueue* queue);
  void issue_alone(std::function<void()> operation);
  [[noreturn]] void end_with(const std::string& error);

  struct ClusterBarrier {
    uint32_t arrived = 0, phase = 0;
    Waiters waiters;
  } cluster_barrier;
  Waiters flag_waiters;  // for any flag in global memory
  int64_t num_flag_stores = 0;

 private:
  friend struct AsyncQueue;
  void run_cluster(unsigned cluster_idx, const std::function<void()>& thread_body);
  void make_block(unsigned block_idx, unsigned rank);
  void switch_to(Thread* thread);
  void switch_back();
  void finish_thread();
  Thread* choose();
  bool run_some_async(const double (&probabilities)[2]);
  void forget_cluster();
  std::string deadlock() const;
  static void enter();

  std::mt19937_64 random_;
  enum class Order { kFirst, kRandom, kPriority } order_;
  double eagerness_[2], when_stuck_[2];  // of each kind: how likely it happens now
  std::vector<AsyncQueue*> listed_[2];   // of each kind
  std::vector<Warp*> warps_;
  int num_live_ = 0;
  int64_t num_steps_ = 0;
  jmp_buf scheduler_;
  const std::function<void()>* body_;
};

inline Thread& current() { return *Machine::get().current; }

// Shared addresses: an offset in the own block's window, or one that mapa made: rank + 1 in the high byte.
struct SharedPlace {
  Block* block;
  uint32_t offset;
  uint8_t* pointer() const { return block->memory + offset; }
};
SharedPlace resolve(uint32_t address, uint32_t bytes, uint32_t alignment);
inline void* shared_pointer(uint32_t address, uint32_t bytes) { return resolve(address, bytes, bytes).pointer(); }
uint32_t shared_offset(const void* pointer);
// Where a store of the current thread, of at most 16 bytes, goes, which wgmma may not read before the thread's
// fence.proxy.async.
void* stored_pointer(uint32_t address, uint32_t bytes);
// fence.proxy.async of the current thread.
void fence_proxy_async();

void sync_named(uint32_t id, uint32_t num_threads);
void arrive_named(uint32_t id, uint32_t num_threads);
void sync_threads();
bool sync_threads_or(bool vote);

// Deposits the lane's arguments; the last of the lanes in `mask` calls combine(all lanes' arguments).
void meet(const char* kind, uint32_t mask, void* argument, const std::function<void(void**)>& combine);

uint8_t* dynamic_shared(uint32_t alignment);

}  // namespace emulator
