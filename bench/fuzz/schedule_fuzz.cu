// Runs schedules of kernels, copies, events and graphs on the GPU and reports which orders of two
// launches it saw broken.  Host entry points are plain C, for ctypes; `fuzz_run` is the one that
// matters.
//
// What is seen: moments by %globaltimer, each taken in front of the moment where it has to come
// early and behind it where it has to come late, so that measuring never breaks an order by itself;
// and completion by a flag that every launch stores last and every later one looks for first.
// Every spin is bounded by time and by a number of rounds; nothing waits for another launch.

#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <vector>

namespace {

constexpr int kNodes = 8;   // launches of one schedule
constexpr int kCtas = 3;    // thread blocks of one kernel
constexpr int kStreams = 3;
constexpr int kEvents = 32;
constexpr int kPhases = 3;  // spins of a kernel: before the trigger, before the wait, after it
constexpr int kRounds = 1 << 14;
constexpr unsigned kSet = 0x01010101u;  // what memset leaves in a word

enum Operation { kKernel, kMemset, kMemcpy, kRecord, kWait, kBeginGraph, kEndGraph };
enum Behaviour { kPdl = 1, kWaits = 2, kEarly = 4, kLate = 8, kFenced = 16 };
enum Source { kTriggered, kExited, kFlushed };  // bit 2 * source + target of a broken order
enum Target { kStart, kWaited };

// One row of a schedule; `what` is a launch's position or an event.
struct Action {
  int operation, stream, what, behaviour;
};

struct Launch {
  unsigned long long start, waited, triggered, exited;
  unsigned seen_at_start, seen_after_wait;  // bit k: the stores of launch k were visible
  unsigned blocks, unused;
};

struct Flags {
  unsigned word[kNodes][4];
  unsigned set[4];  // always kSet: a memcpy that takes all this along has stored its own flag
};

struct State {
  int operation[kNodes];
  unsigned spin[kNodes][kCtas][kPhases];  // microseconds
  Flags flags;
  Flags copied[kNodes];  // what a memcpy saw
  Launch launch[kNodes];
};

__device__ unsigned long long now() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
  return time;
}

__device__ void spin(unsigned microseconds) {
  const unsigned long long until = now() + 1000ull * microseconds;
  for (int round = 0; round < kRounds && now() < until; ++round) __nanosleep(100);
}

__device__ unsigned visible(const State* state) {
  unsigned seen = 0;
  for (int node = 0; node < kNodes; ++node) {
    const bool copy = state->operation[node] == kMemcpy;
    const volatile unsigned* word = copy ? state->copied[node].set : state->flags.word[node];
    bool all = true;
    for (int cta = 0; cta < kCtas; ++cta) all = (word[cta] == kSet) && all;
    seen |= static_cast<unsigned>(all) << node;
  }
  return seen;
}

__device__ void trigger(Launch* launch, int behaviour) {
  if (behaviour & kFenced) __threadfence();
  atomicMax(&launch->triggered, now());
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__global__ void node_kernel(State* state, int node, int behaviour) {
  Launch* launch = &state->launch[node];
  const unsigned* delay = state->spin[node][blockIdx.x];
  atomicMin(&launch->start, now());
  atomicAnd(&launch->seen_at_start, visible(state));
  spin(delay[0]);
  if (behaviour & kEarly) {
    trigger(launch, behaviour);
    spin(delay[1]);
  }
  if (behaviour & kWaits) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    atomicMin(&launch->waited, now());
    atomicAnd(&launch->seen_after_wait, visible(state));
  }
  if (behaviour & kLate) {
    spin(delay[1]);
    trigger(launch, behaviour);
  }
  spin(delay[2]);
  *static_cast<volatile unsigned*>(&state->flags.word[node][blockIdx.x]) = kSet;
  atomicAdd(&launch->blocks, 1u);
  atomicMax(&launch->exited, now());
}

char message[512];
State* device_state = nullptr;
cudaStream_t streams[kStreams];
cudaEvent_t events[kEvents];

#define CHECK(call)                                                                     \
  do {                                                                                  \
    const cudaError_t checked_ = (call);                                                \
    if (checked_ != cudaSuccess) {                                                      \
      snprintf(message, sizeof message, "%s: %s (line %d)", #call,                      \
               cudaGetErrorString(checked_), __LINE__);                                 \
      return 1;                                                                         \
    }                                                                                   \
  } while (0)

#define TRY(call)        \
  do {                   \
    if (call) return 1;  \
  } while (0)

int fail(const char* text, int number) {
  snprintf(message, sizeof message, "%s %d", text, number);
  return 1;
}

struct Random {
  unsigned long long state;
  unsigned below(unsigned n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<unsigned>(state >> 33) % n;
  }
};

int launch_kernel(const Action& action) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kCtas);
  config.blockDim = dim3(1);
  config.stream = streams[action.stream];
  config.attrs = &attribute;
  config.numAttrs = action.behaviour & kPdl ? 1 : 0;
  CHECK(cudaLaunchKernelEx(&config, node_kernel, device_state, action.what, action.behaviour));
  return 0;
}

int issue(const Action& action) {
  cudaStream_t stream = streams[action.stream];
  State* state = device_state;
  switch (action.operation) {
    case kKernel:
      return launch_kernel(action);
    case kMemset:
      CHECK(cudaMemsetAsync(state->flags.word[action.what], 1, sizeof(unsigned[4]), stream));
      return 0;
    case kMemcpy:
      CHECK(cudaMemcpyAsync(&state->copied[action.what], &state->flags, sizeof(Flags),
                            cudaMemcpyDeviceToDevice, stream));
      return 0;
    case kRecord:
      CHECK(cudaEventRecord(events[action.what], stream));
      return 0;
    case kWait:
      CHECK(cudaStreamWaitEvent(stream, events[action.what], 0));
      return 0;
  }
  return fail("no such operation:", action.operation);
}

// Everything of a schedule that is issued again for each repetition: actions, and graphs.
struct Item {
  Action action;
  cudaGraphExec_t graph;  // null: issue the action
};

struct Schedule {
  std::vector<Item> items;
  bool capturing = false;
  cudaStream_t origin = nullptr;
  ~Schedule() {
    cudaGraph_t graph = nullptr;
    if (capturing && cudaStreamEndCapture(origin, &graph) == cudaSuccess && graph)
      cudaGraphDestroy(graph);
    for (Item& item : items)
      if (item.graph) cudaGraphExecDestroy(item.graph);
  }
};

int begin_graph(const Action& action, Schedule* schedule) {
  if (schedule->capturing) return fail("graph in a graph on stream", action.stream);
  schedule->origin = streams[action.stream];
  CHECK(cudaStreamBeginCapture(schedule->origin, cudaStreamCaptureModeThreadLocal));
  schedule->capturing = true;
  return 0;
}

int end_graph(const Action& action, Schedule* schedule) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  if (!schedule->capturing) return fail("no graph to end on stream", action.stream);
  schedule->capturing = false;
  CHECK(cudaStreamEndCapture(schedule->origin, &graph));
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  CHECK(cudaGraphDestroy(graph));
  CHECK(status);
  schedule->items.push_back({action, executable});
  return 0;
}

int prepare(const Action* actions, int count, Schedule* schedule) {
  for (int at = 0; at < count; ++at) {
    const Action& action = actions[at];
    const bool event = action.operation == kRecord || action.operation == kWait;
    if (action.stream < 0 || action.stream >= kStreams) return fail("stream", action.stream);
    if (action.what < 0 || action.what >= (event ? kEvents : kNodes))
      return fail("launch or event", action.what);
    if (action.operation == kBeginGraph) {
      TRY(begin_graph(action, schedule));
    } else if (action.operation == kEndGraph) {
      TRY(end_graph(action, schedule));
    } else if (schedule->capturing) {
      TRY(issue(action));
    } else {
      schedule->items.push_back({action, nullptr});
    }
  }
  if (schedule->capturing) return fail("graph without an end; actions:", count);
  return 0;
}

void reset(const int* operations, Random* random, State* state) {
  static const unsigned kSpins[] = {0, 0, 15, 40, 90, 150};
  memset(state, 0, sizeof *state);
  for (int node = 0; node < kNodes; ++node) {
    state->operation[node] = operations[node];
    Launch& launch = state->launch[node];
    launch.start = launch.waited = ~0ull;
    launch.seen_at_start = launch.seen_after_wait = ~0u;
    for (int phase = 0; phase < kPhases; ++phase) {
      const unsigned common = kSpins[random->below(6)];
      for (int cta = 0; cta < kCtas; ++cta) {
        const bool alone = random->below(4) == 0;  // a block that leaves the others
        state->spin[node][cta][phase] = alone ? kSpins[random->below(6)] : common;
      }
    }
  }
  for (unsigned& word : state->flags.set) word = kSet;
}

int repeat(const Schedule& schedule, const int* operations, Random* random, State* state) {
  reset(operations, random, state);
  CHECK(cudaMemcpy(device_state, state, sizeof *state, cudaMemcpyHostToDevice));
  CHECK(cudaDeviceSynchronize());
  for (const Item& item : schedule.items) {
    if (item.graph)
      CHECK(cudaGraphLaunch(item.graph, streams[item.action.stream]));
    else
      TRY(issue(item.action));
  }
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(state, device_state, sizeof *state, cudaMemcpyDeviceToHost));
  return 0;
}

// The orders "source of first before target of second" that this execution broke, as bits.
unsigned broken_by(const State& state, const int* behaviours, int first, int second) {
  const Launch& a = state.launch[first];
  const Launch& b = state.launch[second];
  const unsigned bit = 1u << first;
  unsigned found = 0;
  const auto add = [&](bool broken, int source, int target) {
    found |= static_cast<unsigned>(broken) << (2 * source + target);
  };
  if (state.operation[second] == kMemset) return 0;  // nobody looks at its start
  if (state.operation[second] == kMemcpy) {
    bool seen = true;
    for (int cta = 0; cta < kCtas; ++cta)
      seen = seen && state.copied[second].word[first][cta] == kSet;
    add(!seen && state.operation[first] != kMemcpy, kFlushed, kStart);
    return found;
  }
  const bool waits = (behaviours[second] & kPdl) && (behaviours[second] & kWaits);
  for (int target = kStart; target <= (waits ? kWaited : kStart); ++target) {
    const unsigned long long time = target == kStart ? b.start : b.waited;
    const bool seen = ((target == kStart ? b.seen_at_start : b.seen_after_wait) & bit) != 0;
    if (state.operation[first] == kKernel) {
      const bool explicitly = (behaviours[first] & (kEarly | kLate)) != 0;
      add((explicitly ? a.triggered : a.exited) > time, kTriggered, target);
      add(a.exited > time, kExited, target);
      add(a.exited > time || !seen, kFlushed, target);
    } else {
      add(!seen, kFlushed, target);
    }
  }
  return found;
}

int collect(const State& state, const int* behaviours, int nodes, unsigned char* broken) {
  for (int second = 0; second < nodes; ++second) {
    const Launch& launch = state.launch[second];
    if (state.operation[second] == kKernel && launch.blocks != kCtas)
      return fail("not every block ran of launch", second);
    for (int first = 0; first < second; ++first, ++broken)
      *broken |= static_cast<unsigned char>(broken_by(state, behaviours, first, second));
  }
  return 0;
}

}  // namespace

extern "C" const char* fuzz_error() { return message; }

// The GPU's name, or null with a message.
extern "C" const char* fuzz_open() {
  static cudaDeviceProp properties;
  const auto open = [&]() -> int {
    CHECK(cudaSetDevice(0));
    CHECK(cudaGetDeviceProperties(&properties, 0));
    if (properties.major < 9) return fail("sm_90 is needed; this is sm of major", properties.major);
    cudaFuncAttributes attributes;  // loads the kernel, which must not happen in a capture
    CHECK(cudaFuncGetAttributes(&attributes, node_kernel));
    CHECK(cudaMalloc(&device_state, sizeof(State)));
    for (cudaStream_t& stream : streams)
      CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (cudaEvent_t& event : events)
      CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return 0;
  };
  return open() ? nullptr : properties.name;
}

// Runs one schedule of `nodes` launches `repetitions` times with other spin times each.  `actions`
// are `count` rows of four numbers.  Orders seen broken are or-ed into `broken`, one byte per pair
// (0,1), (0,2), (1,2), (0,3), ...  Returns 0, or 1 with a message.
extern "C" int fuzz_run(const int* actions, int count, int nodes, int repetitions,
                        unsigned long long seed, unsigned char* broken) {
  const Action* rows = reinterpret_cast<const Action*>(actions);
  int operations[kNodes] = {}, behaviours[kNodes] = {};
  if (nodes < 1 || nodes > kNodes) return fail("number of launches", nodes);
  int launches = 0;
  for (int at = 0; at < count; ++at) {
    if (rows[at].operation > kMemcpy) continue;
    if (rows[at].what != launches || launches == nodes) return fail("launch out of place:", at);
    operations[launches] = rows[at].operation;
    behaviours[launches++] = rows[at].behaviour;
  }
  if (launches != nodes) return fail("launches found:", launches);
  Random random{seed};
  Schedule schedule;
  TRY(prepare(rows, count, &schedule));
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    State state;
    TRY(repeat(schedule, operations, &random, &state));
    TRY(collect(state, behaviours, nodes, broken));
  }
  return 0;
}

extern "C" int fuzz_close() {
  for (cudaStream_t& stream : streams) CHECK(cudaStreamDestroy(stream));
  for (cudaEvent_t& event : events) CHECK(cudaEventDestroy(event));
  CHECK(cudaFree(device_state));
  return 0;
}
