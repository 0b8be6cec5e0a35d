a CPU
2026-01-02"Eigen 3.4.0(27

all-reducefp32cpu-core (@€ IiUMuÿ>Qš™™™™™¹?X2E
linearfp32cpu-core (2bsi,oi+o->bso:IiUMuï>Q{®Gáz”?X	