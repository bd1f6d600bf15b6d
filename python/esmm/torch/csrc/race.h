/*
 * race.h: which of two ways makes a product, the library or torch's own linear, chosen by what calls take. On a CPU.
 *
 * torch brings a dense library of its own, often a newer one than the library finds, so where little is zero it may be
 * faster. The library learns for its first calls; then torch's way is tried, and from there on the other way now and
 * then: the fewer calls apart, the closer the two are. A product's zeros may come and go, so neither way is for good.
 * Each weight has a race for each class of row counts. Deterministic calls go by the library.
 */
#ifndef ESMM_TORCH_RACE_H
#define ESMM_TORCH_RACE_H

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>

namespace {

enum Way { BY_LIBRARY, BY_TORCH };

/* How one call goes. */
struct Turn {
  Way way;
  bool timed;
};

class Race {
public:
  Turn begin()
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t call = calls_++;
    if (call >= trial_) {
      const uint32_t step = call - trial_;
      if (step == 0)
        count_[other()] = 0;
      if (step <= TRIES)
        return {other(), step > 0}; /* the first finds cold caches */
      settle(call);
    }
    return {way_, call % TIMED_EVERY == 0 || trial_ - call <= TRIES};
  }

  void end(Turn turn, double seconds)
  {
    std::lock_guard<std::mutex> lock(mutex_);
    times_[turn.way][count_[turn.way]++ % KEPT] = seconds;
  }

private:
  enum : uint32_t { FIRST = 96, TRIES = 3, KEPT = 4, TIMED_EVERY = 16, APART = 256 };
  static constexpr double MOST_APART = 16; /* times that */
  static constexpr double BETTER = 0.97;   /* the other way has to be so much faster */

  Way other() const { return way_ == BY_LIBRARY ? BY_TORCH : BY_LIBRARY; }

  double least(Way way) const
  {
    const auto first = times_[way].begin();
    return *std::min_element(first, first + std::min<uint32_t>(count_[way], KEPT));
  }

  /* After a trial. Other threads' calls may still be under way: then the next trial decides. */
  void settle(uint32_t call)
  {
    double apart = 1.0;
    if (count_[BY_LIBRARY] && count_[BY_TORCH]) {
      if (least(other()) < BETTER * least(way_))
        way_ = other();
      apart = least(other()) / least(way_);
    }
    trial_ = call + static_cast<uint32_t>(APART * std::max(1.0, std::min(apart, MOST_APART)));
  }

  std::mutex mutex_;
  Way way_ = BY_LIBRARY;
  uint32_t calls_ = 0, trial_ = FIRST; /* the call with which a trial of the other way begins */
  std::array<uint32_t, 2> count_ = {};
  std::array<std::array<double, KEPT>, 2> times_ = {};
};

/* Of one weight: the rows exactly to 16, then in steps of a quarter, as the library classes them. */
class Races {
public:
  Race &of(int64_t rows)
  {
    constexpr int64_t EXACT = 16;
    const double step = rows <= EXACT
                            ? static_cast<double>(rows)
                            : EXACT + std::round(std::log(static_cast<double>(rows) / EXACT) / std::log(1.25));
    std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<Race> &race = races_[static_cast<size_t>(std::min(step, static_cast<double>(races_.size() - 1)))];
    if (!race)
      race = std::make_unique<Race>();
    return *race;
  }

private:
  std::mutex mutex_;
  std::array<std::unique_ptr<Race>, 96> races_;
};

double seconds_now()
{
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

} // namespace

#endif
