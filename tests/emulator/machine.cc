#include "machine.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 << 10;
// Dynamic shared memory begins here, as on hardware, which keeps the first KiB for itself.
constexpr uint32_t kReserved = 1024;
constexpr uint32_t kGuard = 256;
constexpr uint8_t kPoison = 0xFF;  // NaN in every format
constexpr uint8_t kGuardByte = 0xA5;

// Stacks are kept for the next cluster.
std::vector<char*> free_stacks;

char* take_stack() {
  if (free_stacks.empty()) {
    void* memory =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<char*>(memory);
  }
  char* stack = free_stacks.back();
  free_stacks.pop_back();
  return stack;
}

std::string name_of(const Thread& thread) {
  return "block " + std::to_string(thread.block->idx.x) + " thread " + std::to_string(thread.idx.x);
}

}  // namespace

void fail(const std::string& rule) {
  Machine& machine = Machine::get();
  machine.end_with((machine.current != nullptr ? name_of(*machine.current) + ": " : "") + rule);
}

int launch_registers(int blocks) {
  const int num_threads = static_cast<int>(Machine::get().launch.block.x);
  return std::min(65536 / blocks / num_threads / 8 * 8, 255);
}

Machine& Machine::get() {
  static Machine machine;
  return machine;
}

// Asynchronous operations --------------------------------------------------------------------------

void AsyncQueue::issue(std::function<void()> operation) {
  operations.push_back(std::move(operation));
  ++issued;
  if (!is_listed) Machine::get().list(this);
}

void AsyncQueue::run_first() {
  if (!is_ordered) std::swap(operations.front(), operations[Machine::get().random_() % operations.size()]);
  const auto operation = std::move(operations.front());
  operations.pop_front();
  operation();
  ++done;
  const auto is_satisfied = [this](Thread* thread) {
    if (thread->waits_for.first > done) return false;
    Machine::get().wake(thread);
    return true;
  };
  waiters.erase(std::remove_if(waiters.begin(), waiters.end(), is_satisfied), waiters.end());
}

void AsyncQueue::wait_until(int64_t count) {
  if (done < count) Machine::get().wait(waiters, "for % asynchronous operations", static_cast<uint32_t>(count));
}

void Machine::list(AsyncQueue* queue) {
  queue->is_listed = true;
  listed_[queue->kind].push_back(queue);
}

void Machine::issue_alone(std::function<void()> operation) {
  auto* queue = new AsyncQueue;
  queue->is_owned = true;
  queue->issue(std::move(operation));
}

bool Machine::run_some_async(const double (&probabilities)[2]) {
  for (int kind : {AsyncQueue::kReads, AsyncQueue::kWrites}) {
    auto& listed = listed_[kind];
    if (listed.empty() || !chance(probabilities[kind])) continue;
    const size_t i = random_() % listed.size();
    AsyncQueue* queue = listed[i];
    if (!queue->operations.empty()) queue->run_first();
    if (queue->operations.empty()) {
      queue->is_listed = false;
      listed[i] = listed.back();
      listed.pop_back();
      if (queue->is_owned) delete queue;
    }
    return true;
  }
  return false;
}

// Fibers -------------------------------------------------------------------------------------------

void Machine::enter() {
  Machine& machine = get();
  (*machine.body_)();
  machine.finish_thread();
}

__attribute__((noinline)) void Machine::switch_to(Thread* thread) {
  current = thread;
  threadIdx = thread->idx;
  blockIdx = thread->block->idx;
  if (_setjmp(scheduler_) == 0) {
    if (thread->has_started) _longjmp(thread->context, 1);
    thread->has_started = true;
    thread->stack = {take_stack(), [](char* stack) { free_stacks.push_back(stack); }};
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = thread->stack.get();
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, &Machine::enter, 0);
    setcontext(&context);
  }
  current = nullptr;
}

__attribute__((noinline)) void Machine::switch_back() {
  if (_setjmp(current->context) == 0) _longjmp(scheduler_, 1);
}

void Machine::end_with(const std::string& error) {
  if (last_error.empty()) last_error = error;
  if (current == nullptr) throw std::runtime_error(error);
  _longjmp(scheduler_, 1);
}

void Machine::wait(Waiters& waiters, const char* what, uint32_t first, uint32_t second) {
  Thread* thread = current;
  thread->waits_for = {what, first, second};
  thread->warp->ready &= ~(1u << thread->lane);
  waiters.push_back(thread);
  switch_back();
}

void Machine::wake(Thread* thread) { thread->warp->ready |= 1u << thread->lane; }

void Machine::wake(Waiters& waiters) {
  for (Thread* thread : waiters) wake(thread);
  waiters.clear();
}

void Machine::may_switch() {
  // Millions of instructions are the most that the products of tests take.
  if (++num_steps_ > 200'000'000) fail("goes round in a loop that does not end");
  if (order_ == Order::kFirst || (order_ == Order::kRandom && !chance(0.1))) return;
  // Whoever is first may be last later on.
  if (chance(0.01)) current->warp->priority = random_();
  switch_back();
}

void Machine::finish_thread() {
  Thread& thread = *current;
  Block& block = *thread.block;
  if (!thread.accumulators.empty()) fail("ends while wgmma works on its accumulators");
  if (thread.bulk_stores.awaited < thread.bulk_stores.queue.issued) {
    fail("ends without having waited until its TMA stores have read shared memory");
  }
  thread.copies.queue.run_all();
  thread.is_done = true;
  thread.warp->ready &= ~(1u << thread.lane);
  --num_live_;
  if (--block.num_live == 0) {
    if (block.loads_under_way > 0) fail("its block ends while others write to it");
    for (uint32_t i = 0; block.memory_bytes > 0 && i < kGuard; ++i) {
      if (block.memory[block.memory_bytes + i] != kGuardByte) fail("its block wrote past its shared memory");
    }
    block.is_done = true;
  } else {
    // A barrier of the whole block waits for those that are left.
    NamedBarrier& barrier = block.named_barriers[0];
    if (barrier.arrived > 0 && barrier.arrived == static_cast<uint32_t>(block.num_live)) {
      barrier.arrived = 0;
      wake(barrier.waiters);
    }
  }
  switch_back();
}

// Scheduling ---------------------------------------------------------------------------------------

Thread* Machine::choose() {
  Warp* chosen = nullptr;
  uint64_t best = 0, num_ready = 0;
  for (Warp* warp : warps_) {
    if (warp->ready == 0) continue;
    ++num_ready;
    const bool is_better = order_ == Order::kFirst      ? chosen == nullptr
                           : order_ == Order::kPriority ? chosen == nullptr || warp->priority > best
                                                        : random_() % num_ready == 0;
    if (is_better) {
      chosen = warp;
      best = warp->priority;
    }
  }
  if (chosen == nullptr) return nullptr;
  const int first = order_ == Order::kRandom ? random_() % 32 : 0;
  const uint32_t later = chosen->ready >> first << first;
  return chosen->threads[__builtin_ctz(later != 0 ? later : chosen->ready)];
}

std::string Machine::deadlock() const {
  std::map<std::string, std::vector<int>> waiting;
  for (const auto& block : cluster) {
    for (const auto& thread : block->threads) {
      if (!thread->is_done) {
        std::string what;
        uint32_t number = thread->waits_for.first;
        for (const char* text = thread->waits_for.what; *text != 0; ++text) {
          if (*text != '%') {
            what += *text;
            continue;
          }
          what += std::to_string(number);
          number = thread->waits_for.second;
        }
        waiting["block " + std::to_string(block->idx.x) + ", " + what].push_back(thread->idx.x);
      }
    }
  }
  std::ostringstream text;
  text << "deadlock:";
  for (const auto& [what, threads] : waiting) {
    text << "\n  threads ";
    for (size_t i = 0; i < threads.size();) {
      size_t end = i;
      while (end + 1 < threads.size() && threads[end + 1] == threads[end] + 1) ++end;
      text << (i > 0 ? "," : "") << threads[i];
      if (end > i) text << "-" << threads[end];
      i = end + 1;
    }
    text << " of " << what;
  }
  return text.str();
}

void Machine::make_block(unsigned block_idx, unsigned rank) {
  auto block = std::make_unique<Block>();
  block->idx = {block_idx, 0, 0};
  block->rank = rank;
  const size_t bytes = kReserved + launch.shared_bytes + 2 * kGuard;
  block->memory = static_cast<uint8_t*>(std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
  std::memset(block->memory, kPoison, bytes);
  block->unfenced_writers.resize(bytes / kFencedUnit + 1);
  const int num_threads = launch.block.x;
  block->num_live = num_threads;
  for (int i = 0; i < num_threads; ++i) {
    if (i % 32 == 0) {
      block->warps.push_back(std::make_unique<Warp>());
      block->warps.back()->priority = random_();
      warps_.push_back(block->warps.back().get());
    }
    if (i % 128 == 0) {
      block->warpgroups.push_back(std::make_unique<Warpgroup>());
      block->warpgroups.back()->block = block.get();
    }
    auto thread = std::make_unique<Thread>();
    thread->block = block.get();
    thread->warp = block->warps.back().get();
    thread->warpgroup = block->warpgroups.back().get();
    thread->idx = {static_cast<unsigned>(i), 0, 0};
    thread->lane = i % 32;
    thread->remote_writes.is_ordered = false;
    thread->registers = launch_registers(1);
    thread->warp->threads[i % 32] = thread.get();
    thread->warp->ready |= 1u << i % 32;
    block->threads.push_back(std::move(thread));
  }
  num_live_ += num_threads;
  cluster.push_back(std::move(block));
}

void Machine::run_cluster(unsigned cluster_idx, const std::function<void()>& thread_body) {
  body_ = &thread_body;
  num_live_ = 0;
  warps_.clear();
  cluster_barrier = {};
  flag_waiters.clear();
  for (unsigned rank = 0; rank < launch.cluster_size; ++rank)
    make_block(cluster_idx * launch.cluster_size + rank, rank);
  while (num_live_ > 0 && last_error.empty()) {
    if (run_some_async(eagerness_)) continue;
    if (Thread* next = choose()) {
      switch_to(next);
    } else if (!run_some_async(when_stuck_) && !run_some_async({1.0, 1.0})) {
      last_error = deadlock();
    }
  }
  while (last_error.empty() && run_some_async({1.0, 1.0})) continue;
  forget_cluster();
}

void Machine::forget_cluster() {
  for (auto& listed : listed_) {
    for (AsyncQueue* queue : listed) {
      if (queue->is_owned) delete queue;
    }
    listed.clear();
  }
  for (const auto& block : cluster) std::free(block->memory);
  cluster.clear();
}

cudaError_t Machine::run(const Launch& new_launch, const std::function<void()>& thread_body) {
  if (!last_error.empty()) return cudaErrorLaunchFailure;
  launch = new_launch;
  blockDim = launch.block;
  gridDim = launch.grid;
  random_.seed(options.seed);
  num_steps_ = 0;
  // Three ways to order threads, four ways to delay what writes and what reads shared memory: both at once,
  // writes last, reads last, and anything. The first seeds try them all.
  order_ = static_cast<Order>(options.seed % 3);
  constexpr double kEagerness[4][2] = {{1.0, 1.0}, {0.0, 0.0}, {1.0, 0.0}, {0.1, 0.1}};
  constexpr double kWhenStuck[4][2] = {{1.0, 1.0}, {0.0, 1.0}, {1.0, 1.0}, {0.5, 0.5}};
  std::copy_n(kEagerness[options.seed % 4], 2, eagerness_);
  std::copy_n(kWhenStuck[options.seed % 4], 2, when_stuck_);
  try {
    const unsigned num_clusters = launch.grid.x / launch.cluster_size;
    for (unsigned i = 0; i < num_clusters && last_error.empty(); ++i)
      run_cluster(options.last_cluster_first ? num_clusters - 1 - i : i, thread_body);
  } catch (const std::exception& error) {
    if (last_error.empty()) last_error = error.what();
    forget_cluster();
  }
  return last_error.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

// Shared memory ------------------------------------------------------------------------------------

SharedPlace resolve(uint32_t address, uint32_t bytes, uint32_t alignment) {
  Machine& machine = Machine::get();
  const uint32_t rank = address >> 24, offset = address & 0xFFFFFF;
  if (rank > machine.cluster.size()) fail("addresses shared memory of no block of the cluster");
  Block* block = rank > 0 ? machine.cluster[rank - 1].get() : machine.current->block;
  if (offset < kReserved || offset + bytes > block->memory_bytes) {
    fail("addresses shared memory at " + std::to_string(offset) + ", which the block has not got");
  }
  if (offset % alignment != 0) {
    fail("addresses shared memory at " + std::to_string(offset) + ", not a multiple of " + std::to_string(alignment));
  }
  if (block->is_done) fail("addresses shared memory of a block that has ended");
  return {block, offset};
}

void* stored_pointer(uint32_t address, uint32_t bytes) {
  const SharedPlace place = resolve(address, bytes, bytes);
  Thread& thread = current();
  const uint16_t writer = static_cast<uint16_t>(thread.idx.x + 1);
  uint16_t& last = place.block->unfenced_writers[place.offset / kFencedUnit];
  if (last != writer) thread.unfenced_writes.push_back(place.offset / kFencedUnit);
  last = writer;
  return place.pointer();
}

void fence_proxy_async() {
  Thread& thread = current();
  thread.has_fenced_async = true;
  for (const uint32_t unit : thread.unfenced_writes) {
    uint16_t& writer = thread.block->unfenced_writers[unit];
    if (writer == thread.idx.x + 1) writer = 0;
  }
  thread.unfenced_writes.clear();
}

uint32_t shared_offset(const void* pointer) {
  const Block& block = *current().block;
  const auto offset = static_cast<const uint8_t*>(pointer) - block.memory;
  if (offset < 0 || offset > block.memory_bytes) fail("takes the shared address of what is not in shared memory");
  return static_cast<uint32_t>(offset);
}

uint8_t* dynamic_shared(uint32_t alignment) {
  Block& block = *current().block;
  if (block.memory_bytes == 0) {
    // No more aligned than it was asked to be.
    block.dynamic_begin = kReserved + (alignment < 1024 ? alignment : 0);
    block.memory_bytes = block.dynamic_begin + static_cast<uint32_t>(Machine::get().launch.shared_bytes);
    std::memset(block.memory + block.memory_bytes, kGuardByte, kGuard);
  }
  return block.memory + block.dynamic_begin;
}

// Barriers -----------------------------------------------------------------------------------------

// The current thread's arrival: whether it was the last one, after which the barrier begins anew.
static bool arrive_at(NamedBarrier& barrier, uint32_t id, uint32_t num_threads) {
  Thread& thread = current();
  if (barrier.arrived == 0) {
    barrier.expected = num_threads;
    barrier.all_fenced = true;
  }
  if (id > 0 && barrier.expected != num_threads) fail("meets others at a barrier with another number of threads");
  barrier.all_fenced &= thread.has_fenced_async;
  thread.has_fenced_async = false;
  if (++barrier.arrived < num_threads) return false;
  for (Thread* waiter : barrier.waiters) waiter->barrier_was_fenced = barrier.all_fenced;
  barrier.arrived = 0;
  Machine::get().wake(barrier.waiters);
  return true;
}

static NamedBarrier& named_barrier(uint32_t id, uint32_t num_threads) {
  if (id >= 16 || (id > 0 && num_threads % 32 != 0)) fail("names no barrier");
  return current().block->named_barriers[id];
}

void sync_named(uint32_t id, uint32_t num_threads) {
  NamedBarrier& barrier = named_barrier(id, num_threads);
  if (arrive_at(barrier, id, num_threads)) {
    current().barrier_was_fenced = barrier.all_fenced;
    Machine::get().may_switch();
  } else {
    Machine::get().wait(barrier.waiters, "at barrier % of % threads", id, num_threads);
  }
}

void arrive_named(uint32_t id, uint32_t num_threads) {
  arrive_at(named_barrier(id, num_threads), id, num_threads);
  Machine::get().may_switch();
}

void sync_threads() { sync_named(0, current().block->num_live); }

bool sync_threads_or(bool vote) {
  Block& block = *current().block;
  if (vote) block.has_voted_yes = true;
  sync_threads();
  const bool result = block.has_voted_yes;
  sync_threads();
  block.has_voted_yes = false;
  return result;
}

void meet(const char* kind, uint32_t mask, void* argument, const std::function<void(void**)>& combine) {
  Machine& machine = Machine::get();
  Thread& thread = current();
  Rendezvous& meeting = thread.warp->rendezvous;
  if ((mask >> thread.lane & 1) == 0) fail(std::string(kind) + " without being in its mask");
  if (meeting.arrived == 0) {
    meeting.kind = kind;
    meeting.mask = mask;
  }
  if (std::strcmp(meeting.kind, kind) != 0 || meeting.mask != mask) {
    fail(std::string(kind) + " while other lanes of its warp wait at " + meeting.kind);
  }
  meeting.arguments[thread.lane] = argument;
  meeting.arrived |= 1u << thread.lane;
  if (meeting.arrived == mask) {
    combine(meeting.arguments);
    meeting.arrived = 0;
    machine.wake(meeting.waiters);
  } else {
    machine.wait(meeting.waiters, kind);
  }
}

}  // namespace emulator
