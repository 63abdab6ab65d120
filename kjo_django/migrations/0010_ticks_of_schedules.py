from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("kjo_django", "0009_limits"),
    ]

    operations = [
        migrations.AddField(
            model_name="schedule",
            name="late_count",
            field=models.PositiveBigIntegerField(
                db_default=0, default=0, verbose_name="late ticks"
            ),
        ),
        migrations.AddField(
            model_name="schedule",
            name="stored_count",
            field=models.PositiveBigIntegerField(
                db_default=0, default=0, verbose_name="ticks with a job"
            ),
        ),
    ]
