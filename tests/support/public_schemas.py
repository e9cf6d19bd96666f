"""Public data sets as their columns, from memory of the field: name, what its values look like, and its role there.

The values are made up. A role such as `sparse/dense` means that users of the set do both. `out` = left out. A set whose
`label` is "" has no label of two values: `init` must refuse it with its candidates, and `asked` is a column to name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

ROWS = 1500
Random = np.random.Generator
LETTERS = str.maketrans("0123456789", "ghijklmnop")
Values = list[Any]


@dataclass(frozen=True)
class Schema:
    """A data set. `columns`: lines of name, values, role; `asked`: the label to name after the refusal."""

    name: str
    columns: str
    asked: str | None = None
    parquet: bool = False

    def lines(self) -> Iterator[tuple[str, str, str]]:
        for line in self.columns.strip().splitlines():
            names, values, role = (part.strip() for part in line.split(" ; "))
            for name in names.split(","):
                yield name.strip(), values, role

    def roles(self) -> dict[str, str]:
        return {name: role for name, _, role in self.lines()}

    def table(self) -> pa.Table:
        random = np.random.default_rng(len(self.name))
        return pa.table(
            {name: MADE[values.split()[0]](random, *values.split()[1:]) for name, values, _ in self.lines()}
        )


def zipf(random: Random, size: int) -> Any:
    """Values from 0 to `size`, some far more often than others."""
    return (size * random.random(ROWS) ** 3).astype(int)


def hexed(number: int) -> str:
    return f"{(number * 2654435761 + 12345) % 2**32:08x}"


def histories(random: Random, size: int, prefix: str, mark: str | None) -> Values:
    lengths = np.random.default_rng(5).integers(0, 12, ROWS)  # of one length in each row
    lists = [[f"{prefix}{each}" if prefix else int(each) for each in random.integers(0, size, n)] for n in lengths]
    return lists if mark is None else [mark.join(map(str, each)) for each in lists]


def dated(random: Random, form: str) -> Values:
    seconds = np.sort(random.integers(1_500_000_000, 1_505_000_000, ROWS)).astype("datetime64[s]")
    return [form.format(each.item()) for each in seconds]


def worded(random: Random, least: str, most: str) -> Values:
    words = [hexed(each).translate(LETTERS) for each in range(3000)]
    return [" ".join(random.choice(words, random.integers(int(least), int(most)))) for _ in range(ROWS)]


def gone(random: Random, share: float, values: Values) -> Values:
    return [None if missing else value for missing, value in zip(random.random(ROWS) < share, values, strict=True)]


GENRES = ["Drama", "Comedy", "War", "Film-Noir", "Sci-Fi"]
MADE: dict[str, Callable[..., Values]] = {
    "bit": lambda r, share="0.3": list((r.random(ROWS) < float(share)).astype(int)),
    "code": lambda r, size, low="0": list(zipf(r, int(size)) + int(low)),
    "big": lambda r, size: [int(each) * 7919 % 1_000_003 + 100_000 for each in zipf(r, int(size))],
    "hex": lambda r, size: [hexed(int(each)) for each in zipf(r, int(size))],
    "name": lambda r, prefix, size: [f"{prefix}{each}" for each in zipf(r, int(size))],
    "pick": lambda r, *words: [word.replace("_", " ") for word in r.choice(words, ROWS)],
    "count": lambda r, scale="3": list(np.floor(r.lognormal(float(scale), 1.5, ROWS)).astype(int) - 1),
    "gaps": lambda r, scale="3": gone(r, 0.3, list(map(int, r.lognormal(float(scale), 1.5, ROWS)))),
    "float": lambda r, scale="1": [round(each, 4) for each in r.lognormal(float(scale), 1, ROWS)],
    "row": lambda r: list(range(ROWS)),
    "unique": lambda r: [hexed(each) + hexed(each + 9) for each in range(ROWS)],
    "seconds": lambda r, times="1": list(np.sort(r.integers(1_500_000_000, 1_505_000_000, ROWS)) * int(times)),
    "small_seconds": lambda r: list(np.sort(r.integers(0, 1_000_000, ROWS))),
    "date": lambda r: dated(r, "{:%Y-%m-%d}"),
    "datetime": lambda r: dated(r, "{:%Y-%m-%d %H:%M:%S}"),
    "zulu": lambda r: dated(r, "{:%Y-%m-%dT%H:%M:%SZ}"),
    "american": lambda r: dated(r, "{:%m/%d/%Y %I:%M:%S %p}"),
    "yyyymmdd": lambda r: list(map(int, dated(r, "{:%Y%m%d}"))),
    "yymmddhh": lambda r: list(map(int, dated(r, "{:%y%m%d%H}"))),
    "rating": lambda r: list(r.integers(1, 6, ROWS)),
    "half_rating": lambda r: list(r.integers(1, 11, ROWS) / 2),
    "words": worded,
    "lists": lambda r, size, prefix="": histories(r, int(size), prefix, None),
    "bars": lambda r, size: histories(r, int(size), "", "|"),
    "hats": lambda r, size: histories(r, int(size), "", "^"),
    "spaced": lambda r, size, prefix: histories(r, int(size), prefix, " "),
    "genres": lambda r: ["|".join(sorted(r.choice(GENRES, r.integers(1, 4), replace=False))) for _ in range(ROWS)],
    "tags": lambda r: [",".join(map(str, r.integers(10_000, 10_070, r.integers(1, 6)))) for _ in range(ROWS)],
    "vector": lambda r, width: [list(map(float, r.normal(size=int(width)))) for _ in range(ROWS)],
    "same": lambda r, value: [value] * ROWS,
    "mostly": lambda r, size: gone(r, 0.95, list(map(int, zipf(r, int(size))))),
}  # fmt: skip

ADULT = "workclass,education,marital-status,occupation,relationship,race,native-country"
CENSUS = (
    "class_worker,education,hs_college,marital_stat,major_ind_code,major_occ_code,race,hisp_origin,union_member,"
    "unemp_reason,full_or_part_emp,tax_filer_stat,region_prev_res,state_prev_res,det_hh_fam_stat,det_hh_summ,"
    "mig_chg_msa,mig_chg_reg,mig_move_reg,mig_same,mig_prev_sunbelt,fam_under_18,country_father,country_mother,"
    "country_self,citizenship"
)
SCHEMAS = (
    Schema("criteo", f"""
label ; bit ; label
{','.join(f'I{i}' for i in range(1, 14))} ; gaps ; dense
{','.join(f'C{i}' for i in range(1, 27))} ; hex 900 ; sparse"""),
    Schema("avazu", """
id ; unique ; out
click ; bit 0.17 ; label
hour ; yymmddhh ; time
C1 ; code 7 1001 ; sparse
banner_pos ; code 7 ; sparse
site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,device_model ; hex 800 ; sparse
device_type,device_conn_type ; code 5 ; sparse
C14 ; big 900 ; sparse
C15 ; pick 320 300 216 728 ; sparse
C16 ; pick 50 250 36 90 ; sparse
C17 ; code 400 112 ; sparse
C18 ; code 4 ; sparse
C19 ; pick 35 39 167 161 47 ; sparse
C20 ; big 160 ; sparse
C21 ; code 60 13 ; sparse"""),
    Schema("movielens-1m", """
userId ; code 300 1 ; user
movieId ; code 400 1 ; sparse
rating ; half_rating ; label
timestamp ; seconds ; time
title ; words 2 6 ; out/sparse
genres ; genres ; sparse""", asked="rating"),
    Schema("movielens-tags", """
user_id ; code 300 ; user
item_id ; code 500 ; sparse
tag_id ; code 700 ; sparse
label ; bit ; label"""),
    Schema("kuairec", """
user_id ; code 300 ; user
video_id ; code 900 ; sparse
play_duration ; count 8 ; out
video_duration ; count 8 ; dense
time ; datetime ; time
date ; yyyymmdd ; out/sparse/dense
timestamp ; float 9 ; out/dense/time
watch_ratio ; float 0 ; label""", asked="watch_ratio"),
    Schema("kuairand", """
user_id ; code 300 ; user
video_id ; big 1500 ; sparse
date ; yyyymmdd ; out/sparse/dense
hourmin ; code 2359 ; sparse/dense
time_ms ; seconds 1000 ; time
is_click ; bit 0.4 ; label
is_like,is_follow,is_comment,is_forward,is_hate,long_view,is_profile_enter ; bit 0.05 ; out
play_time_ms ; count 8 ; out
duration_ms ; count 9 ; dense
profile_stay_time,comment_stay_time ; count 1 ; out
is_rand ; bit 0.1 ; sparse
tab ; code 15 ; sparse"""),
    Schema("tenrec", """
user_id ; code 300 ; user
item_id ; code 900 ; sparse
click ; bit ; label
follow,like,share ; bit 0.02 ; out
video_category ; code 2 ; sparse
watching_times ; code 9 ; out
gender ; code 3 ; sparse
age ; code 8 ; sparse/dense
hist_1,hist_2,hist_3,hist_4,hist_5 ; code 900 ; sparse"""),
    Schema("ali-ccp", """
click ; bit 0.04 ; label
purchase ; bit 0.01 ; out
101 ; code 900 ; sparse
121,122,124,125,126,127,128,129 ; code 90 ; sparse
205,206,207,210,216 ; big 900 ; sparse
508,509,702,853 ; code 500 ; sparse
301 ; code 3 1 ; sparse""", parquet=True),
    Schema("taobao-ad", """
user ; big 500 ; user
time_stamp ; seconds ; time
adgroup_id ; big 900 ; sparse
pid ; pick 430548_1007 430539_1007 ; sparse
nonclk ; bit ; out/sparse
clk ; bit 0.05 ; label
cate_id ; code 300 1 ; sparse
campaign_id,customer,brand ; big 800 ; sparse
price ; float 4 ; dense
cms_segid ; code 90 ; sparse
cms_group_id ; code 12 ; sparse
final_gender_code ; code 2 1 ; sparse
age_level,pvalue_level,shopping_level,new_user_class_level ; code 4 1 ; sparse
occupation ; bit 0.06 ; sparse"""),
    Schema("taobao-ad-histories", """
clk ; bit 0.05 ; label
userid ; code 500 ; user
cate_id ; code 300 ; sparse
brand ; code 400 ; sparse
price ; float 4 ; dense
btag_his ; hats 5 ; sequence
cate_his ; hats 300 ; sequence
brand_his ; hats 400 ; sequence"""),
    Schema("taobao-behaviour", """
user_id ; code 300 ; user
item_id ; big 900 ; sparse
category_id ; big 200 ; sparse
behavior_type ; pick pv cart fav buy ; label
timestamp ; seconds ; time""", asked=""),
    Schema("amazon", """
reviewerID ; hex 500 ; user
asin ; hex 600 ; sparse
reviewerName ; name Ann_ 480 ; sparse/out
helpful ; tags ; out/sparse
reviewText ; words 20 60 ; out
overall ; rating ; label
summary ; words 2 7 ; out
unixReviewTime ; seconds ; time""", asked="overall"),
    Schema("yelp", """
review_id ; unique ; out
user_id ; hex 500 ; user
business_id ; hex 600 ; sparse
stars ; rating ; label
useful,funny,cool ; count 0 ; dense/out
text ; words 20 60 ; out
date ; datetime ; time
city ; pick Phoenix Las_Vegas Tampa ; sparse
state ; pick AZ NV FL ; sparse""", asked="stars"),
    Schema("lastfm-2k", """
userID ; code 300 ; user
artistID ; code 900 ; sparse
weight ; count 5 ; out""", asked=""),
    Schema("lastfm-1k", """
userid ; name user_ 300 ; user
timestamp ; zulu ; time
artid ; unique ; out
artname ; words 1 3 ; sparse
traname ; words 2 4 ; sparse""", asked=""),
    Schema("steam", """
user_id ; big 400 ; user
game_title ; name Game_ 300 ; sparse
behavior_name ; pick purchase play ; label
value ; float 2 ; dense""", asked="behavior_name"),
    Schema("gowalla", """
user ; code 300 ; user
checkin_time ; zulu ; time
latitude,longitude ; float 3 ; dense
location_id ; big 700 ; sparse""", asked=""),
    Schema("goodreads", """
user_id ; code 300 ; user
book_id ; code 900 ; sparse
is_read ; bit 0.5 ; label
rating ; code 6 ; out
is_reviewed ; bit 0.1 ; out/sparse""", asked="is_read"),
    Schema("netflix", """
movie_id ; code 500 1 ; sparse
customer_id ; big 600 ; user
rating ; rating ; label
date ; date ; time""", asked="rating"),
    Schema("mind", """
impression_id ; code 600 1 ; sparse
user_id ; name U 300 ; user
time ; american ; out
history ; spaced 900 N ; sparse
news_id ; name N 900 ; sparse
category ; pick news sports finance lifestyle ; sparse
subcategory ; name sub 60 ; sparse
title ; words 5 14 ; out
clicked ; bit 0.05 ; label"""),
    Schema("adressa", """
eventId ; big 5000 ; sparse/out
userId ; name cx: 300 ; user
time ; seconds ; time
url ; name http://adressa.no/ 400 ; sparse
activeTime ; mostly 90 ; out/sparse/dense
deviceType ; pick Mobile Desktop Tablet ; sparse
os ; pick iPhone_OS Windows Android ; sparse
city ; name city 60 ; sparse
click ; bit ; label"""),
    Schema("frappe", """
label ; bit 0.33 ; label
user ; code 300 ; user
item ; code 900 ; sparse
daytime,weekday,weather ; code 7 ; sparse
isweekend,cost ; bit 0.5 ; sparse
homework ; code 3 ; sparse
country ; code 80 ; sparse
city ; code 200 ; sparse"""),
    Schema("ipinyou", """
click ; bit 0.05 ; label
weekday ; code 7 ; sparse
hour ; code 24 ; sparse
useragent ; pick windows_ie android_chrome mac_safari ; sparse
IP ; name 1.2.3. 500 ; sparse
region ; code 35 ; sparse
city ; code 370 ; sparse
adexchange ; code 4 1 ; sparse
domain ; hex 400 ; sparse
slotid ; name mm_ 300 ; sparse
slotwidth,slotheight ; pick 300 250 728 90 ; sparse/dense
slotvisibility,slotformat ; code 3 ; sparse
slotprice ; count 3 ; dense
creative ; hex 60 ; sparse
bidprice ; pick 300 277 238 227 ; dense/sparse
payprice ; count 4 ; out
advertiser ; pick 1458 2259 2997 3386 ; sparse
usertag ; tags ; sparse"""),
    Schema("outbrain", """
display_id ; code 700 1 ; sparse
ad_id ; big 900 ; sparse
clicked ; bit 0.2 ; label
uuid ; hex 700 ; sparse/user
document_id ; big 600 ; sparse
timestamp ; small_seconds ; time
platform ; code 3 1 ; sparse
geo_location ; pick US>CA>807 US>NY>501 GB ; sparse
campaign_id,advertiser_id ; code 500 1 ; sparse"""),
    Schema("kdd12", """
Click ; bit 0.04 ; label
DisplayURL ; big 600 ; sparse
AdID ; big 800 ; sparse
AdvertiserID ; code 700 ; sparse
Depth ; code 3 1 ; sparse/dense
Position ; code 3 1 ; sparse/dense
QueryID,KeywordID,TitleID,DescriptionID ; code 900 ; sparse
UserID ; code 600 ; user"""),
    Schema("census", f"""
age ; code 90 ; dense
{CENSUS} ; pick Not_in_universe Private Other_kind ; sparse
wage_per_hour,capital_gains,capital_losses,stock_dividends ; count 1 ; dense
det_ind_code,det_occ_code ; code 50 ; sparse
sex ; pick Male Female ; sparse
instance_weight ; float 7 ; weight
num_emp ; code 6 ; dense
own_or_self,vet_benefits ; code 3 ; sparse
vet_question ; pick Yes No Not_in_universe ; sparse
weeks_worked ; code 53 ; dense
year ; pick 94 95 ; sparse/dense
income ; pick -50000 50000+. ; label"""),
    Schema("adult", f"""
age ; code 70 17 ; dense
fnlwgt ; float 11 ; dense
{ADULT} ; pick Private State-gov Never-worked Other ; sparse
education-num ; code 16 1 ; dense
sex ; pick Male Female ; sparse
capital-gain,capital-loss ; count 1 ; dense
hours-per-week ; code 99 ; dense
salary ; pick <=50K >50K ; label"""),
    Schema("h-and-m", """
t_dat ; date ; time
customer_id ; hex 600 ; user
article_id ; big 800 ; sparse
price ; float -3 ; dense
sales_channel_id ; code 2 1 ; sparse
prod_name ; name Strap_top_ 300 ; sparse
detail_desc ; words 9 30 ; out
label ; bit ; label"""),
    Schema("retailrocket", """
timestamp ; seconds 1000 ; time
visitorid ; big 600 ; user
event ; pick view addtocart transaction ; label
itemid ; big 800 ; sparse
transactionid ; mostly 80 ; out/sparse""", asked=""),
    Schema("diginetica", """
sessionId ; code 500 1 ; user
userId ; mostly 300 ; user
itemId ; big 700 ; sparse
timeframe ; count 9 ; dense
eventdate ; date ; time""", asked=""),
    Schema("yoochoose", """
session_id ; code 600 1 ; user
timestamp ; zulu ; time
item_id ; big 700 ; sparse
category ; pick 0 S 1 2 ; sparse""", asked=""),
    Schema("book-crossing", """
User-ID ; code 400 1 ; user
ISBN ; hex 900 ; sparse
Book-Rating ; code 11 ; label
Location ; name town 300 ; sparse
Age ; gaps 3 ; dense
Book-Author ; name author 400 ; sparse
Year-Of-Publication ; code 60 1942 ; dense/sparse
Publisher ; name press 120 ; sparse""", asked="Book-Rating"),
    Schema("anime", """
user_id ; code 400 1 ; user
anime_id ; code 800 1 ; sparse
rating ; code 11 ; label
type ; pick TV Movie OVA ; sparse
episodes ; count 2 ; dense/sparse
members ; count 8 ; dense
genre ; genres ; sparse""", asked="rating"),
    Schema("epinions", """
user ; code 400 ; user
item ; code 700 ; sparse
category ; code 27 ; sparse
rating ; rating ; label
helpfulness ; code 6 ; out
time ; seconds ; time""", asked="rating"),
    Schema("jester", """
user_id ; code 500 ; user
joke_id ; code 100 ; sparse
rating ; float 1 ; label""", asked="rating"),
    Schema("microvideo", """
user_id ; code 300 ; user
item_id ; code 900 ; sparse
category_id ; code 60 ; sparse
timestamp ; seconds ; time
is_click ; bit ; label
is_like,is_follow ; bit 0.02 ; out
clicked_items ; lists 900 ; sequence
clicked_categories ; lists 60 ; sequence
cover_embedding ; vector 8 ; dense""", parquet=True),
    Schema("criteo-attribution", """
timestamp ; small_seconds ; time
uid ; big 700 ; user
campaign ; big 300 ; sparse
conversion ; bit 0.05 ; out
conversion_timestamp ; mostly 900 ; out
conversion_id ; mostly 900 ; out
attribution ; bit 0.02 ; out
click ; bit 0.4 ; label
click_pos ; mostly 9 ; out
click_nb ; mostly 9 ; out/dense
cost,cpo ; float -8 ; dense
time_since_last_click ; gaps 9 ; dense
cat1,cat2,cat3,cat4,cat5,cat6,cat7,cat8,cat9 ; big 50 ; sparse"""),
    Schema("criteo-uplift", f"""
{','.join(f'f{i}' for i in range(12))} ; float 1 ; dense
treatment ; bit 0.85 ; sparse
conversion ; bit 0.01 ; label
visit,exposure ; bit 0.05 ; out/sparse""", asked="conversion"),
    Schema("instacart", """
order_id ; code 400 1 ; sparse
product_id ; code 900 1 ; sparse
add_to_cart_order ; code 30 1 ; dense/sparse
reordered ; bit 0.6 ; label
user_id ; code 200 1 ; user
order_number ; code 80 1 ; dense/sparse
order_dow ; code 7 ; sparse
order_hour_of_day ; code 24 ; sparse
days_since_prior_order ; code 31 ; dense
aisle_id ; code 134 1 ; sparse
department_id ; code 21 1 ; sparse"""),
    Schema("zvuk", """
user_id ; code 400 ; user
session_id ; code 700 ; sparse
datetime ; datetime ; time
track_id ; big 900 ; sparse
play_duration ; count 5 ; out""", asked=""),
    Schema("xing", """
user_id ; code 500 ; user
item_id ; code 900 ; sparse
interaction_type ; code 6 ; label
created_at ; seconds ; time
career_level ; code 7 ; sparse
discipline_id,industry_id ; code 23 ; sparse
country ; pick de at ch non_dach ; sparse
is_payed,is_paid ; bit 0.3 ; sparse""", asked="interaction_type"),
    Schema("trivago", """
user_id ; hex 400 ; user
session_id ; hex 700 ; sparse
timestamp ; seconds ; time
step ; count 2 ; dense/sparse
platform ; pick AU BR FI UK ; sparse
city ; name city 200 ; sparse
device ; pick mobile desktop tablet ; sparse
impressions ; bars 900 ; sequence
prices ; bars 500 ; sequence
clicked ; bit 0.1 ; label"""),
    Schema("otto", """
session ; code 500 ; user
aid ; big 900 ; sparse
ts ; seconds 1000 ; time
type ; pick clicks carts orders ; label""", asked=""),
    Schema("talkingdata", """
ip ; big 700 ; sparse
app ; code 300 ; sparse
device ; code 100 ; sparse
os ; code 90 ; sparse
channel ; code 200 ; sparse
click_time ; datetime ; time
is_attributed ; bit 0.02 ; label"""),
    Schema("avito", """
SearchID ; big 900 ; sparse
AdID ; big 800 ; sparse
Position ; pick 1 7 2 6 ; sparse
ObjectType ; same 3 ; out
HistCTR ; float -4 ; dense
IsClick ; bit 0.03 ; label"""),
    Schema("expedia", """
date_time ; datetime ; time
site_name ; code 50 ; sparse
posa_continent ; code 5 ; sparse
user_location_country,user_location_region,user_location_city ; code 300 ; sparse
orig_destination_distance ; float 7 ; dense
user_id ; code 500 ; user
is_mobile,is_package ; bit 0.2 ; sparse
channel ; code 11 ; sparse
srch_adults_cnt,srch_children_cnt,srch_rm_cnt ; code 9 ; dense
srch_destination_id ; code 700 ; sparse
is_booking ; bit 0.08 ; label
cnt ; count 0 ; dense/sparse
hotel_cluster ; code 100 ; sparse"""),
    Schema("bank-marketing", """
age ; code 60 18 ; dense
job ; pick admin blue-collar technician ; sparse
marital ; pick married single ; sparse
education ; pick primary secondary ; sparse
default,housing,loan ; pick yes no ; sparse
balance ; count 6 ; dense
contact ; pick cellular telephone ; sparse
day ; code 31 1 ; sparse/dense
month ; pick jan feb mar ; sparse
duration ; count 5 ; dense/out
campaign ; count 1 ; dense/sparse
pdays ; count 3 ; dense
previous ; count 0 ; dense
poutcome ; pick success failure other ; sparse
y ; pick yes no ; label"""),
    Schema("home-credit", """
SK_ID_CURR ; row ; out
TARGET ; bit 0.08 ; label
NAME_CONTRACT_TYPE ; pick Cash Revolving ; sparse
CODE_GENDER ; pick M F ; sparse
FLAG_OWN_CAR,FLAG_OWN_REALTY ; pick Y N ; sparse
CNT_CHILDREN ; code 5 ; dense
AMT_INCOME_TOTAL,AMT_CREDIT ; float 12 ; dense
DAYS_BIRTH ; count 9 ; dense
DAYS_EMPLOYED ; count 7 ; dense
OCCUPATION_TYPE ; pick Laborers Managers ; sparse
WEEKDAY_APPR_PROCESS_START ; pick MONDAY TUESDAY ; sparse
HOUR_APPR_PROCESS_START ; code 24 ; sparse
REGION_RATING_CLIENT ; code 3 1 ; sparse/dense
ORGANIZATION_TYPE ; name org 50 ; sparse
EXT_SOURCE_1,EXT_SOURCE_2 ; float -1 ; dense"""),
    Schema("ieee-fraud", """
TransactionID ; row ; out
isFraud ; bit 0.03 ; label
TransactionDT ; small_seconds ; time
TransactionAmt ; float 4 ; dense
ProductCD ; pick W C R ; sparse
card1 ; big 900 ; sparse
card2 ; code 500 100 ; sparse
card4 ; pick visa mastercard ; sparse
addr1 ; code 300 100 ; sparse
dist1 ; gaps 3 ; dense
P_emaildomain ; pick gmail.com yahoo.com ; sparse
C1,C2 ; count 1 ; dense
D1,D2 ; gaps 4 ; dense
M1,M2 ; pick T F ; sparse"""),
    Schema("kkbox-songs", """
msno ; hex 400 ; user
song_id ; hex 800 ; sparse
source_system_tab ; pick discover my_library ; sparse
source_screen_name ; pick Local Search ; sparse
source_type ; pick online local ; sparse
target ; bit 0.5 ; label"""),
    Schema("alimama-search", """
instance_id ; unique ; out
item_id ; big 700 ; sparse
item_category_list ; name 7908382889764677758;57999 40 ; sparse
item_brand_id,item_city_id ; big 300 ; sparse
item_price_level,item_sales_level,item_collected_level,item_pv_level ; code 15 ; sparse
user_id ; big 800 ; user
user_gender_id ; code 3 ; sparse
user_age_level ; code 8 1000 ; sparse
user_occupation_id ; code 4 2002 ; sparse
user_star_level ; code 11 3000 ; sparse
context_id ; unique ; out
context_timestamp ; seconds ; time
context_page_id ; code 20 4001 ; sparse
shop_id ; big 400 ; sparse
shop_review_num_level ; code 25 ; sparse
shop_review_positive_rate,shop_score_service ; float -1 ; dense
is_trade ; bit 0.02 ; label"""),
    Schema("telco-churn", """
customerID ; unique ; out
gender ; pick Male Female ; sparse
SeniorCitizen ; bit ; sparse
Partner,Dependents ; pick Yes No ; sparse
tenure ; code 72 ; dense
InternetService ; pick DSL Fiber No ; sparse
Contract ; pick Month One Two ; sparse
MonthlyCharges ; float 4 ; dense
TotalCharges ; float 6 ; dense
Churn ; pick Yes No ; label"""),
    Schema("rees46", """
event_time ; datetime ; time
event_type ; pick view cart purchase ; label
product_id ; big 600 ; sparse
category_id ; big 200 ; sparse
category_code ; pick electronics.smartphone apparel.shoes ; sparse
brand ; name b 80 ; sparse
price ; float 5 ; dense
user_id ; big 500 ; user
user_session ; hex 900 ; sparse""", asked=""),
    Schema("santander-app", """
ncodpers ; big 500 ; sparse/user
fecha_dato ; date ; time
age ; code 80 18 ; dense
antiguedad ; code 200 ; dense/sparse
renta ; float 11 ; dense
segmento ; pick 01-TOP 02-PART ; sparse
label ; bit ; label"""),
)  # fmt: skip
