// Simulates lanes of work that run concurrently and slow one another down.
#include <limits>

#include "hostward.h"

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kNothing = 1e-12;  // seconds that are left of work which has ended

struct Lane {
  const int32_t* order = nullptr;
  int64_t count = 0;                // of a round
  int64_t next = 0;                 // place of the next piece in `order`
  int64_t round = 0;                // of the next piece; the number of rounds: there is none
  int64_t running = 0;              // its place among ends
  const double* blocked = nullptr;  // the end that the next piece waits for; null: not known
  double left_s = kNever;           // of the running piece, at full speed; infinite: none runs
};

class Simulation {
 public:
  Simulation(const hostward_lanes& lanes, double* starts, double* ends)
      : lanes_(lanes), starts_(starts), ends_(ends), total_(lanes.works * lanes.rounds) {
    for (int64_t i = 0; i < total_; ++i) ends_[i] = kNever;
    int64_t begin = 0;
    for (int i = 0; i < HOSTWARD_LANES; ++i) {
      lane_[i].order = lanes.orders + begin;
      lane_[i].count = lanes.lane_ends[i] - begin;
      begin = lanes.lane_ends[i];
    }
  }

  // Returns whether all work has ended.
  bool run() {
    double now = 0.0;
    for (;;) {
      for (Lane& lane : lane_) start(&lane, now);
      const double* speeds = lanes_.speeds + HOSTWARD_LANES * busy();
      double least = kNever;
      for (int i = 0; i < HOSTWARD_LANES; ++i) {
        const double needed = lane_[i].left_s / speeds[i];
        if (needed < least) least = needed;
      }
      if (least == kNever) break;
      now += least;
      for (int i = 0; i < HOSTWARD_LANES; ++i) advance(&lane_[i], least * speeds[i], now);
    }
    for (int64_t i = 0; i < total_; ++i) {
      if (ends_[i] == kNever) return false;
    }
    return true;
  }

 private:
  // Starts the next piece of an idle lane, if all that it waits for has ended.
  void start(Lane* lane, double now) {
    if (lane->left_s != kNever || lane->round == lanes_.rounds || lane->count == 0) return;
    if (lane->blocked != nullptr && *lane->blocked > now) return;
    const int64_t work = lane->order[lane->next], first = lanes_.works * lane->round;
    const int64_t begin = work == 0 ? 0 : lanes_.wait_ends[work - 1];
    for (int64_t i = begin; i < lanes_.wait_ends[work]; ++i) {
      const int64_t other = first + lanes_.waits[i];
      if (other >= 0 && ends_[other] > now) {  // there is nothing before the first round
        lane->blocked = &ends_[other];
        return;
      }
    }
    lane->blocked = nullptr;
    lane->left_s = lanes_.seconds[work];
    lane->running = first + work;
    starts_[lane->running] = now;
    if (++lane->next == lane->count) {
      lane->next = 0;
      ++lane->round;
    }
  }

  void advance(Lane* lane, double done_s, double now) {
    lane->left_s -= done_s;
    if (lane->left_s > kNothing) return;
    ends_[lane->running] = now;
    lane->left_s = kNever;
  }

  // Which of the lanes that share bandwidth run: all but the first.
  int busy() const {
    int found = 0;
    for (int i = 1; i < HOSTWARD_LANES; ++i) {
      if (lane_[i].left_s != kNever) found += 1 << (i - 1);
    }
    return found;
  }

  const hostward_lanes& lanes_;
  double* starts_;
  double* ends_;
  int64_t total_;
  Lane lane_[HOSTWARD_LANES];
};

int check(const hostward_lanes& lanes) {
  if (lanes.works < 0 || lanes.rounds < 0) return HOSTWARD_ERROR_ARGUMENT;
  int64_t before = 0;
  for (const int64_t end : lanes.lane_ends) {
    if (end < before) return HOSTWARD_ERROR_ARGUMENT;
    before = end;
  }
  if (before != lanes.works) return HOSTWARD_ERROR_ARGUMENT;
  int64_t begin = 0;
  for (int64_t i = 0; i < lanes.works; ++i) {
    const bool named = lanes.orders[i] >= 0 && lanes.orders[i] < lanes.works;
    const bool timed = lanes.seconds[i] >= 0.0 && lanes.seconds[i] < kNever;
    if (!named || !timed || lanes.wait_ends[i] < begin) return HOSTWARD_ERROR_ARGUMENT;
    for (; begin < lanes.wait_ends[i]; ++begin) {
      if (lanes.waits[begin] < -lanes.works || lanes.waits[begin] >= lanes.works) return HOSTWARD_ERROR_ARGUMENT;
    }
  }
  return HOSTWARD_OK;
}

}  // namespace

int hostward_simulate_lanes(const hostward_lanes* lanes, double* starts, double* ends) {
  if (lanes == nullptr || lanes->speeds == nullptr) return HOSTWARD_ERROR_NULL;
  if (lanes->works > 0 && (lanes->seconds == nullptr || lanes->orders == nullptr || lanes->wait_ends == nullptr ||
                           starts == nullptr || ends == nullptr)) {
    return HOSTWARD_ERROR_NULL;
  }
  if (const int code = check(*lanes)) return code;
  return Simulation(*lanes, starts, ends).run() ? HOSTWARD_OK : HOSTWARD_ERROR_ORDER;
}
