#pragma once
// Max-min fair sharing of links by transfers that overlap in time.
//
// A flow i at full speed, rate 1, fills a fraction u[i][l] of link l. The rates
// x are max-min fair when
//   x[i] <= 1                        for every flow (its own speed limit),
//   sum over i of x[i] * u[i][l] <= 1   for every link,
// and no x[i] can grow without shrinking some x[j] <= x[i]. There is exactly
// one such x, found by progressive filling (Bertsekas and Gallager, Data
// Networks, 1992, section 6.5.2; the model of SimGrid's network, Velho et al.,
// 2013): all rates grow together from 0; when a link is full its flows stop
// there and the others grow on.

#include <span>
#include <vector>

#include "planner/base/ids.h"

namespace tessera {

struct LinkUse {
  LinkId link;
  double utilisation = 0;  // of the link's bandwidth, by the flow at rate 1
};

// The rate of each flow, in (0, 1]. A flow names a link at most once. A flow
// that uses no link has rate 1. REQUIRES: utilisations are positive. Takes
// O(links * uses); the same flows give the same bits.
std::vector<double> MaxMinRates(std::span<const std::vector<LinkUse>> flows);

}  // namespace tessera
